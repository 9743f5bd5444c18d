"""What a container gets to see: whole CDI specs, and the rules behind them."""

import doctest
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.encoding import to_json
from cdi.spec import parse_name
from cdi.validate import check
from dra_driver.k8s.claims import ClaimRef, ClaimUid, ShareId
from dra_driver.model.driver_files import DeviceFile, DeviceFiles
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsPriority,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.plan.prepare import cdi_spec
from dra_driver.plan.prepare.cdi_spec import ContainerDevice, cdi_device_id, claim_spec
from hack.cdi_apply import apply_edits
from tests.builders import gpu
from tests.conftest import Golden

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


def test_one_gpu(golden: Golden) -> None:
    golden("cdi/one-gpu.json", to_json(claim_spec(CLAIM, [granted(0)], nodes())))


def test_eight_gpus_of_a_driver_container(golden: Golden) -> None:
    eight = [granted(minor) for minor in range(8)]
    container = nodes("/run/nvidia/driver/dev")
    golden("cdi/eight-gpus-driver-container.json", to_json(claim_spec(CLAIM, eight, container)))


def test_shares_of_one_gpu(golden: Golden) -> None:
    consumed = (("memory", "20Gi"), ("cores", "25"))
    shares = [granted(0, share=ShareId(f"share-{n}"), consumed=consumed) for n in (1, 2)]
    golden("cdi/two-shares.json", to_json(claim_spec(CLAIM, shares, nodes())))


@pytest.mark.parametrize("protocol", [2, 3])
def test_two_gpus_and_a_share_by_mps(golden: Golden, protocol: int) -> None:
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
    golden(f"cdi/mps-protocol-{protocol}.json", to_json(claim_spec(CLAIM, gets, nodes())))


@pytest.mark.parametrize("looks", ["a", "z"])
def test_a_device_that_is_also_looked_at_keeps_the_way_to_its_server(looks: str) -> None:
    namespace = MpsNamespace(MpsNamespaceName("c_0"), CLAIM.uid, (gpu(0).uuid,))
    both = [granted(0, request=looks), granted(0, request="b", served=served(namespace, 3))]

    for gets in (both, both[::-1]):
        (device,) = claim_spec(CLAIM, gets, nodes()).devices
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
)
def test_every_spec_is_legal_has_the_answered_ids_and_does_not_depend_on_order(
    picked: list[tuple[int, str | None]], shuffle: random.Random
) -> None:
    devices = [granted(m, share=ShareId(share) if share else None) for m, share in picked]
    spec = claim_spec(CLAIM, devices, nodes())
    check(spec)
    ids = {cdi_device_id(CLAIM.uid, grant.gpu.name, grant.share) for grant in devices}
    assert {f"{spec.kind}={device.name}" for device in spec.devices} == ids
    assert all(str(parse_name(name)) == name for name in ids)
    shuffle.shuffle(devices)
    assert to_json(claim_spec(CLAIM, devices, nodes())) == to_json(spec)


def test_a_claim_that_holds_and_watches_one_gpu_names_it_once() -> None:
    (device,) = claim_spec(CLAIM, [granted(0), granted(0)], nodes()).devices
    assert device.name == f"{CLAIM.uid}-gpu-0"


def test_a_container_does_not_learn_of_gpus_it_does_not_get() -> None:
    spec = claim_spec(CLAIM, [granted(0), granted(1)], nodes())
    given = spec.container_edits + spec.devices[0].container_edits
    text = repr(given)
    assert gpu(0).uuid in text
    assert gpu(1).uuid not in text and "nvidia1" not in text and "DEVICE_1" not in text


def test_a_container_with_two_claims_learns_of_both() -> None:
    other = ClaimRef("ml", "more", ClaimUid("1c7ef5a2"))
    config: dict[str, object] = {}
    for claim, minor in ((CLAIM, 0), (other, 1)):
        spec = claim_spec(claim, [granted(minor)], nodes())
        for part in (spec.container_edits, spec.devices[0].container_edits):
            config = apply_edits(config, replace(part, device_nodes=()))
    env = config["process"]["env"]  # type: ignore[index]
    assert {"GPU_DEVICE_0_CLAIM=ml/train", "GPU_DEVICE_1_CLAIM=ml/more"} <= set(env)


def test_what_a_share_may_use_is_told() -> None:
    device = ContainerDevice(
        gpu(1, uuid=GpuUuid("GPU-1")), ShareId("s"), (("memory", "20Gi"), ("a.b/c-d", "1"))
    )
    spec = claim_spec(CLAIM, [device], nodes())
    assert spec.devices[0].container_edits.env == (
        "GPU_DEVICE_1_UUID=GPU-1",
        "GPU_DEVICE_1_CLAIM=ml/train",
        "GPU_DEVICE_1_C_D=1",
        "GPU_DEVICE_1_MEMORY=20Gi",
    )


def test_the_examples_in_the_docs_hold() -> None:
    assert doctest.testmod(cdi_spec).failed == 0
