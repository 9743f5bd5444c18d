"""The GPUs of this machine; tests that need them are skipped with the reason where it has none."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import Claim, ClaimRef
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.node.driver.commands import run_command
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import open_node
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.publish.offers import OfferBuilder
from hack.cdi_apply import inject
from tests.builders import claim
from tests.fakes.preparers import preparer_of
from tests.gpu import smi
from tests.gpu.bundle import Bundle, Chroot, Config, Run, base_config, runtime, why_not
from tests.gpu.rootfs import make_rootfs

_SMI_SECONDS = 60.0


@pytest.fixture(scope="session")
def driver() -> DriverRoot:
    """This machine's driver."""
    root = DriverRoot(None, Path("/"))
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has no NVIDIA GPU: /dev/nvidiactl is missing")
    try:
        root.nvml_library()
    except NodeError as e:
        pytest.skip(f"this machine's GPU has no driver here: {e}")
    return root


@pytest.fixture(scope="session")
def ask_smi(driver: DriverRoot):
    """nvidia-smi, run as the driver would run it."""
    return lambda *args: run_command(driver.command("nvidia-smi", *args), _SMI_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def settings_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever these tests do, nobody's settings of a GPU are others afterwards."""
    on_gpu = any(item.get_closest_marker("gpu") for item in request.session.items)
    if not on_gpu or not Path("/dev/nvidiactl").exists():
        yield
        return
    ask = request.getfixturevalue("ask_smi")
    before = {gpu.uuid: gpu.settings for gpu in smi.parse(ask("-q", "-x")).gpus}
    yield
    assert {gpu.uuid: gpu.settings for gpu in smi.parse(ask("-q", "-x")).gpus} == before


@pytest.fixture(scope="session")
def document(ask_smi) -> smi.Smi:
    """What nvidia-smi says of this machine."""
    return smi.parse(ask_smi("-q", "-x"))


@pytest.fixture(scope="session")
def node(driver: DriverRoot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuNode]:
    """This machine as the plugin opens it."""
    with open_node(NodeConfig(), tmp_path_factory.mktemp("unused")) as opened:
        if not opened.inventory().gpus:
            pytest.skip(f"no GPU is offered here: {opened.inventory().unavailable}")
        yield opened


class Claims:
    """The claims of these tests, in the place of the API server."""

    def __init__(self) -> None:
        self._claims: dict[ClaimRef, Claim] = {}

    def put(self, name: str, *devices: str) -> ClaimRef:
        made = claim(*devices, name=name)
        self._claims[made.ref] = made
        return made.ref

    def read(self, ref: ClaimRef) -> Claim:
        return self._claims[ref]


_KEEPS = ApiFeatures()


class World:
    """The plugin's own road from a claim to a CDI file, on this machine's GPUs."""

    def __init__(self, directory: Path, node: GpuNode) -> None:
        self.node = node
        self.claims = Claims()
        self.cdi = directory / "cdi"
        self.ledger = Ledger(directory / "state", "this-boot")
        specs = CdiSpecFiles(self.cdi, "k8s.gpu.nvidia.com")
        files = ClaimFiles(specs, MetadataFiles(directory / "plugin"))
        offers = OfferBuilder(node, lambda: DEFAULT_PROFILE, lambda: _KEEPS, self.ledger)
        self.preparer = preparer_of(node, offers, self.claims, self.ledger, files, CallTimeouts())

    def config(self, name: str, *devices: str) -> Config:
        """A container's configuration, once a claim for *devices* is prepared for it."""
        prepared = self.preparer.prepare(self.claims.put(name, *devices))
        ids = [cdi_id for device in prepared for cdi_id in device.cdi_ids]
        return inject(base_config(), ids, [self.cdi])


@pytest.fixture
def world(tmp_path: Path, node: GpuNode) -> World:
    return World(tmp_path, node)


@pytest.fixture(scope="session")
def rootfs(driver: DriverRoot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container's root with everything in it but the driver."""
    directory = tmp_path_factory.mktemp("bundle")
    make_rootfs(directory / "rootfs", driver.files())
    return directory / "rootfs"


@pytest.fixture(scope="session")
def container(rootfs: Path) -> Run:
    """Runs a program in a real container."""
    program = runtime()
    if program is None:
        pytest.skip("no OCI runtime: install runc or crun, or name one in OCI_RUNTIME")
    bundle = Bundle(rootfs.parent, program)
    if reason := why_not(bundle.run):
        pytest.skip(f"{program} starts no container here: {reason}")
    return bundle.run


@pytest.fixture(scope="session")
def chroot(rootfs: Path) -> Run:
    """Runs a program in a chroot."""
    place = Chroot(rootfs)
    if reason := why_not(place.run):
        pytest.skip(f"no chroot with mounts of its own here: {reason}")
    return place.run


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]):
    """Print a measured number even where the test passes."""

    def say(lines: Sequence[str]) -> None:
        with capsys.disabled():
            sys.stdout.write("".join(f"\n    {line}" for line in lines))

    return say
