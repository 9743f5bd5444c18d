"""What containers get of the installed driver: the driver's CDI spec, and the rules behind it."""

import os
import platform
import random
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.encoding import to_json
from cdi.spec import ContainerEdits, Spec
from cdi.validate import check
from dra_driver.k8s.claims import ClaimRef, ClaimUid, ShareId
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, DriverLibrary
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, ServedNamespace
from dra_driver.node.driver.root import DriverRoot
from dra_driver.plan.prepare.cdi_spec import (
    ContainerDevice,
    cdi_device_id,
    claim_spec,
)
from dra_driver.plan.prepare.driver_spec import driver_spec, driver_spec_id
from hack.cdi_apply import inject
from tests.builders import gpu
from tests.conftest import Golden
from tests.fakes.driver import install, install_extras, install_own_versions, listen

HOOK = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"


@pytest.fixture
def debian(tmp_path: Path) -> DriverFiles:
    install_own_versions(install(tmp_path))
    install_extras(tmp_path)
    listen(tmp_path / "run/nvidia-persistenced/socket").close()
    return DriverRoot(None, tmp_path).files()


@pytest.fixture
def gke(tmp_path: Path) -> DriverFiles:
    install(tmp_path / "home/kubernetes/bin/nvidia", directory="lib64", tools="bin")
    return DriverRoot(None, tmp_path).files()


@pytest.fixture
def container(tmp_path: Path) -> DriverFiles:
    """A driver container on Arm."""
    root = tmp_path / "run/nvidia/driver"
    install(root, directory="usr/lib/aarch64-linux-gnu", machine="aarch64")
    return DriverRoot(None, tmp_path).files()


def test_the_driver_of_a_debian_host(debian: DriverFiles, golden: Golden) -> None:
    golden("cdi/driver-debian.json", to_json(driver_spec(debian)))


def test_the_driver_of_a_driver_container(container: DriverFiles, golden: Golden) -> None:
    golden("cdi/driver-container.json", to_json(driver_spec(container)))


def test_the_driver_on_gke(gke: DriverFiles, golden: Golden) -> None:
    golden("cdi/driver-gke.json", to_json(driver_spec(gke)))


def test_the_driver_with_nvidias_hook(debian: DriverFiles, golden: Golden) -> None:
    golden("cdi/driver-hook.json", to_json(driver_spec(debian, HOOK)))


def test_its_one_device_has_the_id_that_claims_are_answered_with() -> None:
    for driver in ("gpu.nvidia.com", "gpu.example.org"):
        spec = driver_spec(_DRIVER, driver=driver)
        (device,) = spec.devices
        assert f"{spec.kind}={device.name}" == driver_spec_id(driver)


@given(shuffle=st.randoms(), hook=st.sampled_from([None, HOOK]))
def test_every_spec_is_legal_and_does_not_depend_on_the_order_of_files(
    shuffle: random.Random, hook: str | None
) -> None:
    libraries = list(_DRIVER.libraries)
    shuffle.shuffle(libraries)
    again = replace(_DRIVER, libraries=tuple(sorted(libraries)))
    spec = driver_spec(_DRIVER, hook)
    check(spec)
    assert to_json(driver_spec(again, hook)) == to_json(spec)


def test_everything_of_the_driver_is_read_only(debian: DriverFiles) -> None:
    mounts = driver_spec(debian).container_edits.mounts
    assert mounts
    assert all({"ro", "nosuid", "nodev", "rbind"} <= set(mount.options) for mount in mounts)


def test_no_path_is_mounted_twice(debian: DriverFiles) -> None:
    paths = [m.container_path for m in driver_spec(debian).container_edits.mounts]
    assert len(paths) == len(set(paths))


def test_programs_find_the_libraries_by_each_name_they_ask_for(debian: DriverFiles) -> None:
    spec = driver_spec(debian)
    for directory in ("/usr/lib/x86_64-linux-gnu/", "/usr/lib64/"):
        names = {
            m.container_path.removeprefix(directory)
            for m in spec.container_edits.mounts
            if m.container_path.startswith(directory)
        }
        assert {
            "libcuda.so",  # dlopen of many programs, -lcuda
            "libcuda.so.1",
            "libnvidia-ml.so.1",
            "libnvidia-ptxjitcompiler.so.1",
            "libnvidia-gpucomp.so.580.95.05",  # the soname has the version
            "libnvidia-nvvm.so.4",
            "libnvidia-nvvm70.so.4",
            "libGLX_indirect.so.0",
        } <= names
        assert "libcuda.so.580.95.05" not in names  # nothing asks for the file's own name


def test_a_name_that_programs_load_is_there_even_if_the_host_lacks_the_link() -> None:
    driver = replace(
        _DRIVER, libraries=(DriverLibrary("/usr/lib64/libcuda.so.580.95.05", "libcuda.so.1"),)
    )
    mounts = driver_spec(driver).container_edits.mounts
    assert "/usr/lib64/libcuda.so" in {mount.container_path for mount in mounts}


def test_triton_is_told_where_libcuda_is(debian: DriverFiles, container: DriverFiles) -> None:
    """It looks into the cache, which is not touched."""
    for host, machine in ((debian, "x86_64"), (container, "aarch64")):
        edits = driver_spec(host).container_edits
        (variable,) = (e for e in edits.env if e.startswith("TRITON_LIBCUDA_PATH="))
        directory = variable.partition("=")[2]
        assert directory == f"/usr/lib/{machine}-linux-gnu"
        mounted = {mount.container_path for mount in edits.mounts}
        assert {f"{directory}/libcuda.so", f"{directory}/libcuda.so.1"} <= mounted


def test_the_loader_of_this_system_searches_one_of_the_directories_by_itself() -> None:
    """What the plan without hooks rests on, asked of a real glibc."""
    loader = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
    program = loader.get(platform.machine(), "")
    if not Path(program).exists():
        pytest.skip("no glibc here")
    output = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=10).stdout
    searched = {
        os.path.realpath(match)
        for match in re.findall(r"^\s+(/\S+) \(system search path\)$", output, re.MULTILINE)
    }
    if not searched:
        pytest.skip("a glibc before 2.33 does not tell what it searches")
    ours = {f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64"}
    assert searched & {os.path.realpath(directory) for directory in ours}


def test_the_order_of_directories_does_not_matter(tmp_path: Path) -> None:
    """Installed in another order, a directory lists its files in another order."""
    specs = []
    for side, turn in (("one", 1), ("other", -1)):
        names = [("libcuda", "libcuda.so.1"), *_OTHERS][::turn]
        install(tmp_path / side, names=names)
        driver = DriverRoot("/", tmp_path / side).files()
        specs.append(driver_spec(driver))
    assert specs[0] == specs[1]


def written(directory: Path, *specs: Spec) -> Path:
    """The CDI directory with these files."""
    for number, spec in enumerate(specs):
        (directory / f"{number}.json").write_text(to_json(spec))
    return directory


def claimed(name: str, *minors: int) -> tuple[Spec, Sequence[str]]:
    """The CDI spec of a claim for these GPUs, and the ids that it is answered with."""
    ref = ClaimRef("ml", name, ClaimUid(f"uid-{name}"))
    devices = [ContainerDevice(gpu(minor)) for minor in minors]
    spec = replace(claim_spec(ref, devices, _nodes(*minors)), container_edits=ContainerEdits())
    bare = tuple(
        replace(each, container_edits=replace(each.container_edits, device_nodes=()))
        for each in spec.devices  # no such file is on this machine
    )
    ids = [
        cdi_id
        for device in devices
        for cdi_id in (cdi_device_id(ref.uid, device.gpu.name), driver_spec_id())
    ]
    return replace(spec, devices=bare), ids


def test_a_container_with_two_claims_of_several_gpus_gets_the_driver_once(
    debian: DriverFiles, tmp_path: Path
) -> None:
    one, one_ids = claimed("one", 0, 1)
    other, other_ids = claimed("other", 2)
    specs = written(tmp_path, one, other, driver_spec(debian, HOOK))

    config: dict[str, Any] = inject({}, [*one_ids, *other_ids], [specs])

    hooks = [tuple(hook["args"]) for hook in config["hooks"]["createContainer"]]
    assert len(hooks) == len(set(hooks)) == len(driver_spec(debian, HOOK).container_edits.hooks)
    env = config["process"]["env"]
    assert "GPU_DRIVER_VERSION=580.95.05" in env
    assert {f"GPU_DEVICE_{minor}_UUID={gpu(minor).uuid}" for minor in (0, 1, 2)} <= set(env)
    destinations = [mount["destination"] for mount in config["mounts"]]
    assert len(destinations) == len(set(destinations))


def _names(edits: ContainerEdits) -> set[str]:
    """What *edits* set: variables, and paths in the container."""
    variables = {entry.partition("=")[0] for entry in edits.env}
    return (
        variables
        | {each.path for each in edits.device_nodes}
        | {mount.container_path for mount in edits.mounts}
    )


@given(
    minors=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
    protocol=st.sampled_from([None, 2, 3]),
    hook=st.sampled_from([None, HOOK]),
)
def test_it_sets_nothing_that_a_claim_sets(
    minors: list[int], protocol: int | None, hook: str | None
) -> None:
    uid = ClaimUid("uid")
    served = None
    if protocol is not None:
        uuids = tuple(gpu(minor).uuid for minor in minors)
        namespace = MpsNamespace(MpsNamespaceName("c_0"), uid, uuids, 50, (1 << 30,) * len(uuids))
        shm = "/run/mps/shm" if protocol == 2 else ""
        served = ServedNamespace(namespace, protocol, "/run/mps/pipe", shm)
    consumed = (("memory", "20Gi"), ("cores", "30"))
    devices = [ContainerDevice(gpu(m), ShareId("s"), consumed, served=served) for m in minors]

    of_claim = claim_spec(ClaimRef("ml", "train", uid), devices, _nodes(*minors))
    of_driver = driver_spec(_DRIVER, hook)

    set_by_claim = set().union(*map(_names, of_claim.all_edits))
    assert set_by_claim
    assert not set_by_claim & set().union(*map(_names, of_driver.all_edits))


def _nodes(*minors: int) -> DeviceFiles:
    control = DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255)
    gpus = {n: DeviceFile(f"/dev/nvidia{n}", f"/dev/nvidia{n}", 195, n) for n in minors}
    return DeviceFiles((control,), gpus)


_OTHERS = (
    ("libnvidia-ml", "libnvidia-ml.so.1"),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
)
_DRIVER = DriverFiles(
    version="580.95.05",
    root="/",
    machine="x86_64",
    lib_dir="/usr/lib64",
    libraries=tuple(
        sorted(DriverLibrary(f"/usr/lib64/{stem}.so.580.95.05", soname) for stem, soname in _OTHERS)
    ),
)
