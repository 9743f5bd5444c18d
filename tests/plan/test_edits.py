"""What a container gets to see: whole CDI specs, and the rules behind them."""

import doctest
import os
import platform
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.encoding import to_json
from cdi.spec import parse_name
from cdi.validate import check
from dra_driver.k8s.claims import ClaimRef, ClaimUid, ShareId
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, DriverLibrary
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsPriority,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.node.driver.root import DriverRoot
from dra_driver.plan.prepare import cdi_spec
from dra_driver.plan.prepare.cdi_spec import CdiHost, ContainerDevice, cdi_device_id, claim_spec
from hack.cdi_apply import apply_edits
from tests.builders import gpu
from tests.conftest import Golden
from tests.fakes.driver import install, install_extras, install_own_versions, listen

CLAIM = ClaimRef("ml", "train", ClaimUid("0b7ef5a2-5a07-4b8c-9b5f-0c7d8f3f0a11"))
GIB = 1024**3
HOOK = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"


def granted(minor: int, **fields: object) -> ContainerDevice:
    return ContainerDevice(gpu(minor), **fields)  # type: ignore[arg-type]


def served(namespace: MpsNamespace, protocol: int) -> ServedNamespace:
    directory = f"/run/mps/{mps_server_name(namespace.gpus)}"
    if protocol == 2:
        return ServedNamespace(namespace, 2, f"{directory}/pipe", f"{directory}/shm")
    return ServedNamespace(namespace, 3, f"{directory}/pipe/{namespace.name}")


def nodes(dev: str = "/dev", gpus: int = 8) -> DeviceFiles:
    def file(name: str, major: int, minor: int) -> DeviceFile:
        return DeviceFile(f"{dev}/{name}", f"/dev/{name}", major, minor)

    return DeviceFiles(
        common=(
            file("nvidia-modeset", 195, 254),
            file("nvidia-uvm", 511, 0),
            file("nvidia-uvm-tools", 511, 1),
            file("nvidiactl", 195, 255),
        ),
        gpus={minor: file(f"nvidia{minor}", 195, minor) for minor in range(gpus)},
    )


@pytest.fixture
def debian(tmp_path: Path) -> CdiHost:
    install_own_versions(install(tmp_path))
    install_extras(tmp_path)
    listen(tmp_path / "run/nvidia-persistenced/socket").close()
    return CdiHost(DriverRoot(None, tmp_path).files(), nodes())


@pytest.fixture
def gke(tmp_path: Path) -> CdiHost:
    install(tmp_path / "home/kubernetes/bin/nvidia", directory="lib64", tools="bin")
    return CdiHost(DriverRoot(None, tmp_path).files(), nodes())


@pytest.fixture
def container(tmp_path: Path) -> CdiHost:
    """A driver container on Arm."""
    root = tmp_path / "run/nvidia/driver"
    install(root, directory="usr/lib/aarch64-linux-gnu", machine="aarch64")
    return CdiHost(DriverRoot(None, tmp_path).files(), nodes("/run/nvidia/driver/dev"))


def test_one_gpu_of_a_debian_host(debian: CdiHost, golden: Golden) -> None:
    golden("cdi/one-gpu.json", to_json(claim_spec(CLAIM, [granted(0)], debian)))


def test_eight_gpus_of_a_driver_container(container: CdiHost, golden: Golden) -> None:
    eight = [granted(minor) for minor in range(8)]
    golden("cdi/eight-gpus-driver-container.json", to_json(claim_spec(CLAIM, eight, container)))


def test_one_gpu_on_gke(gke: CdiHost, golden: Golden) -> None:
    golden("cdi/gke.json", to_json(claim_spec(CLAIM, [granted(3)], gke)))


def test_one_gpu_with_nvidias_hook(debian: CdiHost, golden: Golden) -> None:
    spec = claim_spec(CLAIM, [granted(0)], replace(debian, hook=HOOK))
    golden("cdi/hook.json", to_json(spec))


def test_shares_of_one_gpu(debian: CdiHost, golden: Golden) -> None:
    consumed = (("memory", "20Gi"), ("cores", "25"))
    shares = [granted(0, share=ShareId(f"share-{n}"), consumed=consumed) for n in (1, 2)]
    golden("cdi/two-shares.json", to_json(claim_spec(CLAIM, shares, debian)))


@pytest.mark.parametrize("protocol", [2, 3])
def test_two_gpus_and_a_share_by_mps(debian: CdiHost, golden: Golden, protocol: int) -> None:
    """Containers with the GPUs 0 and 1 have one server, those with a part of GPU 2 another."""
    several = MpsNamespace(
        MpsNamespaceName("c_several"), CLAIM.uid, (gpu(0).uuid, gpu(1).uuid), 50, (GIB, GIB)
    )
    single = MpsNamespace(
        MpsNamespaceName("c_single"),
        CLAIM.uid,
        (gpu(2).uuid,),
        30,
        (4 * GIB,),
        MpsPriority.BELOW_NORMAL,
    )
    share = {"share": ShareId("share"), "consumed": (("cores", "30"), ("memory", "4Gi"))}
    gets = [
        granted(0, served=served(several, protocol)),
        granted(1, served=served(several, protocol)),
        granted(2, served=served(single, protocol), **share),
    ]
    golden(f"cdi/mps-protocol-{protocol}.json", to_json(claim_spec(CLAIM, gets, debian)))


@pytest.mark.parametrize("looks", ["a", "z"])
def test_a_device_that_is_also_looked_at_keeps_the_way_to_its_server(
    debian: CdiHost, looks: str
) -> None:
    namespace = MpsNamespace(MpsNamespaceName("c_0"), CLAIM.uid, (gpu(0).uuid,))
    both = [granted(0, request=looks), granted(0, request="b", served=served(namespace, 3))]

    for gets in (both, both[::-1]):
        (device,) = claim_spec(CLAIM, gets, debian).devices
        way = f"CUDA_MPS_PIPE_DIRECTORY=/run/mps/{mps_server_name(namespace.gpus)}/pipe/c_0"
        assert way in device.container_edits.env


@pytest.mark.point(98)
def test_the_id_is_the_one_that_nvidias_driver_gives() -> None:
    assert cdi_device_id(CLAIM.uid, DeviceName("gpu-0")) == (
        f"k8s.gpu.nvidia.com/claim={CLAIM.uid}-gpu-0"
    )
    share = ShareId("5a07")
    assert cdi_device_id(CLAIM.uid, DeviceName("gpu-0"), share, "gpu.example.org") == (
        f"k8s.gpu.example.org/claim={CLAIM.uid}-gpu-0-5a07"
    )


@pytest.mark.point(96, 101)
@given(
    picked=st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from([None, "a", "b"])), min_size=1, unique=True
    ),
    shuffle=st.randoms(),
    hook=st.sampled_from([None, HOOK]),
)
def test_every_spec_is_legal_has_the_answered_ids_and_does_not_depend_on_order(
    picked: list[tuple[int, str | None]], shuffle: random.Random, hook: str | None
) -> None:
    host = CdiHost(_DRIVER, nodes(), hook)
    devices = [granted(m, share=ShareId(share) if share else None) for m, share in picked]
    spec = claim_spec(CLAIM, devices, host)
    check(spec)
    ids = {cdi_device_id(CLAIM.uid, grant.gpu.name, grant.share) for grant in devices}
    assert {f"{spec.kind}={device.name}" for device in spec.devices} == ids
    assert all(str(parse_name(name)) == name for name in ids)
    libraries = list(_DRIVER.libraries)
    shuffle.shuffle(devices)
    shuffle.shuffle(libraries)
    again = replace(host, driver=replace(_DRIVER, libraries=tuple(sorted(libraries))))
    assert to_json(claim_spec(CLAIM, devices, again)) == to_json(spec)


def test_the_order_of_directories_does_not_matter(tmp_path: Path) -> None:
    """Installed in another order, a directory lists its files in another order."""
    specs = []
    for side, turn in (("one", 1), ("other", -1)):
        names = [("libcuda", "libcuda.so.1"), *_OTHERS][::turn]
        install(tmp_path / side, names=names)
        driver = DriverRoot("/", tmp_path / side).files()
        specs.append(claim_spec(CLAIM, [granted(0)], CdiHost(driver, nodes())))
    assert specs[0] == specs[1]


def test_a_claim_that_holds_and_watches_one_gpu_names_it_once(debian: CdiHost) -> None:
    (device,) = claim_spec(CLAIM, [granted(0), granted(0)], debian).devices
    assert device.name == f"{CLAIM.uid}-gpu-0"


def test_a_container_does_not_learn_of_gpus_it_does_not_get(debian: CdiHost) -> None:
    spec = claim_spec(CLAIM, [granted(0), granted(1)], debian)
    given = spec.container_edits + spec.devices[0].container_edits
    text = repr(given)
    assert gpu(0).uuid in text
    assert gpu(1).uuid not in text and "nvidia1" not in text and "DEVICE_1" not in text


def test_a_container_with_two_claims_learns_of_both(debian: CdiHost) -> None:
    other = ClaimRef("ml", "more", ClaimUid("1c7ef5a2"))
    config: dict[str, object] = {}
    for claim, minor in ((CLAIM, 0), (other, 1)):
        spec = claim_spec(claim, [granted(minor)], debian)
        for part in (spec.container_edits, spec.devices[0].container_edits):
            config = apply_edits(config, replace(part, device_nodes=()))
    env = config["process"]["env"]  # type: ignore[index]
    assert {"GPU_DEVICE_0_CLAIM=ml/train", "GPU_DEVICE_1_CLAIM=ml/more"} <= set(env)
    destinations = [mount["destination"] for mount in config["mounts"]]  # type: ignore[attr-defined]
    assert len(destinations) == len(set(destinations))


def test_everything_of_the_driver_is_read_only(debian: CdiHost) -> None:
    mounts = claim_spec(CLAIM, [granted(0)], debian).container_edits.mounts
    assert mounts
    assert all({"ro", "nosuid", "nodev", "rbind"} <= set(mount.options) for mount in mounts)


def test_no_path_is_mounted_twice(debian: CdiHost) -> None:
    paths = [
        m.container_path for m in claim_spec(CLAIM, [granted(0)], debian).container_edits.mounts
    ]
    assert len(paths) == len(set(paths))


def test_programs_find_the_libraries_by_each_name_they_ask_for(debian: CdiHost) -> None:
    spec = claim_spec(CLAIM, [granted(0)], debian)
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
    mounts = claim_spec(CLAIM, [granted(0)], CdiHost(driver, nodes())).container_edits.mounts
    assert "/usr/lib64/libcuda.so" in {mount.container_path for mount in mounts}


def test_triton_is_told_where_libcuda_is(debian: CdiHost, container: CdiHost) -> None:
    """It looks into the cache, which is not touched."""
    for host, machine in ((debian, "x86_64"), (container, "aarch64")):
        edits = claim_spec(CLAIM, [granted(0)], host).container_edits
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


def test_what_a_share_may_use_is_told() -> None:
    device = ContainerDevice(
        gpu(1, uuid=GpuUuid("GPU-1")), ShareId("s"), (("memory", "20Gi"), ("a.b/c-d", "1"))
    )
    spec = claim_spec(CLAIM, [device], CdiHost(_DRIVER, nodes()))
    assert spec.devices[0].container_edits.env == (
        "GPU_DEVICE_1_UUID=GPU-1",
        "GPU_DEVICE_1_CLAIM=ml/train",
        "GPU_DEVICE_1_C_D=1",
        "GPU_DEVICE_1_MEMORY=20Gi",
    )


def test_the_examples_in_the_docs_hold() -> None:
    assert doctest.testmod(cdi_spec).failed == 0


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
