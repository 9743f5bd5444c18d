"""What a look at a node yields."""

from pathlib import Path

import pytest
import yaml

from dra_driver.base.errors import NodeError
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.sim.host.directory import SimulatedHost
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.node_spec import bundled_nodes
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, as_yaml, h100, no_nvidia_modprobe, two_gpus

ODD = Path(__file__).parents[2] / "data/nodes"


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, two_gpus())
    assert node.host
    return node


def unavailable(node: Node) -> dict[str, str]:
    return {missing.what: missing.reason for missing in node.gpus().scan().unavailable}


def minors(gpus: GpuDiscovery) -> list[int]:
    return [device.minor for device in gpus.scan().gpus]


@pytest.mark.parametrize("name", bundled_nodes())
def test_every_bundled_node_gives_the_inventory_that_a_reviewer_read(name, tmp_path, golden):
    live = LiveNode.named(name)
    SimulatedHost(live, tmp_path)
    nvml = Nvml(lambda: SimulatedNvml(live), GeometryCache)
    gpus = GpuDiscovery(nvml, PciBus(tmp_path / "sys"), tmp_path / "dev", no_nvidia_modprobe)
    golden(f"inventories/{name}.yaml", as_yaml(gpus.scan()))


def test_an_odd_node_offers_what_is_sound_and_says_why_the_rest_is_not(tmp_path):
    node = Node(tmp_path, yaml.safe_load((ODD / "faulty.yaml").read_text()), deadline_seconds=0.3)
    inventory = node.gpus().scan()
    assert [f"{missing.what}: {missing.reason}" for missing in inventory.unavailable] == [
        "GPU 0000:1b:00.0: reading its state: NVML says GPU is lost; it fell off the bus: drain "
        "and reboot the node",
        "GPU 0000:43:00.0: it is bound to nouveau; to offer it here, bind it to nvidia instead",
        "GPU 0000:52:00.0: no driver is bound to it: load the nvidia module; if that is loaded, "
        "look for NVRM in the kernel log",
        "GPU 0000:61:00.0: reading its state: no answer within 0.54 s: it may hang; look for Xid "
        "and NVRM in the kernel log, and if it stays so, drain and reboot the node",
    ]
    assert [device.name for device in inventory.gpus] == ["gpu-4", "gpu-5"]
    node.change(gpu=3, hangs=False)


def test_devices_come_by_minor_number_not_by_bus_id(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b", minor=3), h100("43", minor=0)]})
    assert minors(node.gpus()) == [0, 3]


@pytest.mark.parametrize("driver", ["not-loaded", "no-library"])
def test_while_the_driver_is_not_ready_all_gpus_wait(node, driver):
    gpus = node.gpus()
    node.change(driver=driver)
    node.live.current()
    inventory = gpus.scan()
    assert inventory.gpus == ()
    assert [missing.what for missing in inventory.unavailable] == ["all GPUs"]
    node.change(driver="ready")
    gpus.scan()
    assert minors(gpus) == [0, 1]


def test_a_node_without_nvidia_gpus_is_empty_whatever_nvml_says(tmp_path):
    node = Node(tmp_path, {"driver": "not-loaded", "gpus": []})
    inventory = node.gpus().scan()
    assert (inventory.gpus, inventory.unavailable) == ((), ())


def test_gpus_of_virtual_machines_are_named_even_when_nvml_cannot_start(tmp_path):
    gpus = [h100("1b", driver="vfio-pci"), h100("43")]
    node = Node(tmp_path, {"driver": "not-loaded", "gpus": gpus})
    assert list(unavailable(node)) == ["GPU 0000:1b:00.0", "all GPUs"]
    node = Node(tmp_path, {"driver": "not-loaded", "gpus": gpus[:1]})
    assert list(unavailable(node)) == ["GPU 0000:1b:00.0"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"fails": "GPU_IS_LOST"}, "reading its state: NVML says GPU is lost"),
        ({"fails": {"nvmlDeviceGetName": "UNKNOWN"}}, "reading its properties: NVML says Unknown"),
        ({"driver": "vfio-pci"}, "bound to vfio-pci"),
        ({"driver": "none"}, "no driver is bound"),
        (
            {"device_nodes": False},
            "no device node, and none could be made: there is no nvidia-modprobe",
        ),
    ],
    ids=lambda missing: str(missing),
)
def test_a_fault_of_one_gpu_makes_that_one_alone_unavailable(node, fault, reason):
    node.change(gpu=0, **fault)
    inventory = node.gpus().scan()
    assert [device.minor for device in inventory.gpus] == [1]
    (missing,) = inventory.unavailable
    assert missing.what.startswith("GPU 0000:1b:00.0")
    assert reason in missing.reason


@pytest.mark.parametrize(
    ("same", "reason"),
    [
        ({"minor": 7}, "minor number 7 to 2 GPUs"),
        ({"uuid": "GPU-6f3b3c52-0c3e-5d0b-9d7f-6a1f5a0d9c11"}, "gives this UUID to 2 GPUs"),
    ],
)
def test_gpus_that_cannot_be_told_apart_are_all_unavailable(tmp_path, same, reason):
    node = Node(tmp_path, {"gpus": [h100("1b", **same), h100("43", **same), h100("9d")]})
    inventory = node.gpus().scan()
    assert [device.pci_bus_id for device in inventory.gpus] == ["0000:9d:00.0"]
    assert [reason in missing.reason for missing in inventory.unavailable] == [True, True]


def test_a_gpu_that_the_driver_has_and_nvml_does_not_list_is_named(node):
    (node.root / "sys/bus/pci/devices/0000:99:00.0").symlink_to("../../../devices/x/0000:99:00.0")
    directory = node.root / "sys/devices/x/0000:99:00.0"
    directory.mkdir(parents=True)
    for name, value in (("class", "0x030200"), ("vendor", "0x10de"), ("numa_node", "-1")):
        (directory / name).write_text(value)
    (directory / "driver").symlink_to(node.root / "sys/bus/pci/drivers/nvidia")
    assert "NVML does not list it" in unavailable(node)["GPU 0000:99:00.0"]


def test_links_that_cannot_be_read_are_no_reason_not_to_offer_a_gpu(node):
    node.change(gpu=0, fails={"nvmlDeviceGetNvLinkState": "UNKNOWN"})
    first, second = node.gpus().scan().gpus
    assert (first.topology.nvlink_clique, second.topology.nvlink_clique) == (None, None)


def test_what_a_faulty_gpu_is_linked_to_does_not_change_for_its_neighbours(node):
    gpus = node.gpus()
    before = gpus.scan().gpus[1]
    node.change(gpu=0, fails="GPU_IS_LOST")
    assert gpus.scan().gpus[1] == before


def test_a_board_whose_memory_is_not_reported_is_offered_without_it(node):
    node.change(gpu=0, fails={"nvmlDeviceGetMemoryInfo": "NOT_SUPPORTED"})
    assert node.gpus().scan().gpus[0].memory_bytes is None


def test_missing_device_nodes_are_made_before_a_gpu_is_unavailable(node):
    node.change(gpu=1, device_nodes=False)
    node.live.current()

    def make(minors: tuple[int, ...]) -> None:
        for minor in minors:
            (node.root / f"dev/nvidia{minor}").symlink_to("/dev/null")

    assert minors(node.gpus(make)) == [0, 1]


def test_an_attempt_to_make_nodes_that_failed_is_told_and_not_repeated_at_every_look(node):
    node.change(gpu=1, device_nodes=False)
    tries = []

    def make(minors: tuple[int, ...]) -> None:
        tries.append(minors)
        raise NodeError("nvidia-modprobe is missing")

    gpus = node.gpus(make)
    gpus.scan()
    (missing,) = gpus.scan().unavailable
    assert missing.reason.endswith("none could be made: nvidia-modprobe is missing")
    assert tries == [(1,)]


def test_device_nodes_that_are_kept_elsewhere_are_good_too(node):
    (node.root / "dev/nvidia0").unlink()
    sure = []
    gpus = node.gpus(sure.append)
    assert minors(gpus) == minors(gpus) == [0, 1]
    assert sure == [(0,)]


def test_a_device_node_that_is_lost_again_is_made_again(node):
    place = node.root / "dev/nvidia0"
    gpus = node.gpus(lambda minors: place.symlink_to("/dev/null"))
    for _ in range(2):
        place.unlink()
        assert minors(gpus) == [0, 1]
        assert minors(gpus) == [0, 1]
        assert place.is_symlink()


def test_a_file_in_the_place_of_a_device_node_is_none(node):
    (node.root / "dev/nvidia0").unlink()
    (node.root / "dev/nvidia0").write_text("")
    assert minors(node.gpus()) == [1]


def test_a_pci_bus_that_cannot_be_read_is_an_error(node, tmp_path):
    (tmp_path / "bus/pci").mkdir(parents=True)
    (tmp_path / "bus/pci/devices").write_text("")
    with pytest.raises(NodeError, match="cannot read PCI devices"):
        GpuDiscovery(node.nvml, PciBus(tmp_path), tmp_path, lambda minors: None).scan()
