"""Where GPUs sit, read from a sysfs."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.node.driver.pci import PciBus, PciGpu, canonical_bus_id

PORT, SWITCH = "pci0000:15/0000:15:01.0", "pci0000:15/0000:15:01.0/0000:16:00.0"
GPU, AUDIO, BRIDGE, NETWORK = "0x030200", "0x040300", "0x060400", "0x020700"


class Sysfs:
    """A sysfs that a test fills."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "bus/pci/devices"
        self.devices.mkdir(parents=True)

    def add(self, path: str, kind: str, vendor: str = "0x10de", numa_node: str = "0") -> Path:
        directory = self.root / "devices" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in (("class", kind), ("vendor", vendor), ("numa_node", numa_node)):
            (directory / name).write_text(f"{value}\n")
        (self.devices / directory.name).symlink_to(os.path.relpath(directory, self.devices))
        return directory

    def bind(self, directory: Path, driver: str) -> None:
        place = self.root / "bus/pci/drivers" / driver
        place.mkdir(parents=True, exist_ok=True)
        (directory / "driver").unlink(missing_ok=True)
        (directory / "driver").symlink_to(os.path.relpath(place, directory))

    def remove(self, name: str) -> None:
        shutil.rmtree((self.devices / name).resolve())
        (self.devices / name).unlink()

    def behind_a_switch(self) -> None:
        """A root port, and a switch with two GPUs below it."""
        self.add(PORT, BRIDGE, "0x8086")
        self.add(SWITCH, BRIDGE, "0x1000")
        for number, bus in ((1, "1b"), (2, "43")):
            self.add(f"{SWITCH}/0000:17:0{number}.0", BRIDGE, "0x1000")
            self.add(f"{SWITCH}/0000:17:0{number}.0/0000:{bus}:00.0", GPU)


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


def only(sysfs: Sysfs) -> PciGpu:
    (gpu,) = PciBus(sysfs.root).gpus().values()
    return gpu


@pytest.mark.point(95)
@pytest.mark.parametrize(
    ("printed", "published"),
    [
        ("00000000:65:00.0", "0000:65:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0009:01:00.0", "0009:01:00.0"),
        ("00010000:E1:1F.7", "10000:e1:1f.7"),
    ],
)
def test_bus_ids_are_converted_from_the_form_of_nvml(printed, published):
    assert canonical_bus_id(printed) == published


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFF), st.integers(0, 0x1F), st.integers(0, 7))
def test_every_bus_id_has_one_form_however_it_is_printed(domain, bus, device, function):
    published = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    printed = f"{domain:08X}:{bus:02X}:{device:02X}.{function}"
    assert canonical_bus_id(printed) == canonical_bus_id(published) == published


@given(st.text(alphabet="0123456789abcdefg:. \n", max_size=20))
def test_a_text_is_a_bus_id_or_refused(text):
    try:
        assert canonical_bus_id(canonical_bus_id(text)) == canonical_bus_id(text)
    except NodeError as error:
        assert "is no PCI bus id" in str(error)


def test_a_machine_without_pci_has_no_gpus(tmp_path):
    assert PciBus(tmp_path / "nothing").gpus() == {}


@pytest.mark.point(95)
def test_a_gpu_is_placed_below_root_switch_and_numa_node(sysfs):
    sysfs.behind_a_switch()
    assert PciBus(sysfs.root).gpus() == {
        name: PciGpu(name, None, "pci0000:15", "0000:16:00.0", 0)
        for name in ("0000:1b:00.0", "0000:43:00.0")
    }


def test_a_network_card_below_the_same_switch_shares_it(sysfs):
    sysfs.behind_a_switch()
    sysfs.remove("0000:43:00.0")
    sysfs.add(f"{SWITCH}/0000:17:03.0/0000:18:00.0", NETWORK, "0x15b3")
    assert only(sysfs).switch == "0000:16:00.0"


def test_a_gpu_that_shares_only_the_root_port_names_that(sysfs):
    sysfs.add(f"{PORT}/0000:16:00.0/0000:17:00.0", GPU)
    sysfs.add(f"{PORT}/0000:1a:00.0", NETWORK, "0x15b3")
    assert only(sysfs).switch == "0000:15:01.0"


@pytest.mark.parametrize(
    ("neighbour", "kind"),
    [
        pytest.param(f"{PORT}/0000:16:00.1", AUDIO, id="the audio of the same board"),
        pytest.param(f"{PORT}/0000:1a:00.0", BRIDGE, id="a port with nothing below it"),
        pytest.param("pci0000:15/0000:15:02.0", NETWORK, id="a device of the root complex"),
    ],
)
def test_a_gpu_that_shares_no_bridge_with_another_device_has_no_switch(sysfs, neighbour, kind):
    sysfs.add(PORT, BRIDGE)
    sysfs.add(f"{PORT}/0000:16:00.0", GPU)
    sysfs.add(neighbour, kind)
    assert only(sysfs).switch is None


def test_a_gpu_straight_on_the_root_bus_has_a_root_and_no_switch(sysfs):
    sysfs.add("pci0000:00/0000:00:1e.0", GPU)
    assert (only(sysfs).root, only(sysfs).switch) == ("pci0000:00", None)


def test_a_virtual_function_is_neither_a_gpu_nor_a_neighbour(sysfs):
    gpu = sysfs.add(f"{PORT}/0000:16:00.0", GPU)
    virtual = sysfs.add(f"{PORT}/0000:16:01.4", GPU)
    (virtual / "physfn").symlink_to(gpu)
    assert only(sysfs) == PciGpu("0000:16:00.0", None, "pci0000:15", None, 0)


def test_the_first_root_on_the_way_counts(sysfs):
    sysfs.add("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0", GPU)
    assert only(sysfs).root == "pci0000:00"


@pytest.mark.point(95)
@pytest.mark.parametrize(("text", "node"), [("-1", None), ("0", 0), ("3", 3), ("", None)])
def test_a_numa_node_that_the_kernel_does_not_know_is_absent(sysfs, text, node):
    sysfs.add(f"{PORT}/0000:16:00.0", GPU, numa_node=text)
    assert only(sysfs).numa_node == node


@pytest.mark.parametrize(
    ("kind", "vendor"),
    [(AUDIO, "0x10de"), ("0x068000", "0x10de"), ("0x030000", "0x1a03")],
    ids=["audio", "an NVSwitch", "another vendor's display"],
)
def test_what_is_no_display_function_of_nvidia_is_no_gpu(sysfs, kind, vendor):
    sysfs.add(f"{PORT}/0000:16:00.0", kind, vendor)
    assert PciBus(sysfs.root).gpus() == {}


def test_a_display_card_of_nvidia_is_a_gpu(sysfs):
    sysfs.add(f"{PORT}/0000:16:00.0", "0x030000")
    assert only(sysfs).bus_id == "0000:16:00.0"


def test_a_driver_that_is_bound_later_is_seen(sysfs):
    tree, directory = PciBus(sysfs.root), sysfs.add(f"{PORT}/0000:16:00.0", GPU)
    states = []
    for driver in (None, "nvidia", "vfio-pci"):
        if driver:
            sysfs.bind(directory, driver)
        states.append(tree.gpus()["0000:16:00.0"].driver)
    assert states == [None, "nvidia", "vfio-pci"]


def test_gpus_that_come_and_go_are_seen(sysfs):
    tree = PciBus(sysfs.root)
    assert list(tree.gpus()) == []
    sysfs.behind_a_switch()
    assert list(tree.gpus()) == ["0000:1b:00.0", "0000:43:00.0"]
    sysfs.remove("0000:1b:00.0")
    assert list(tree.gpus()) == ["0000:43:00.0"]
    assert tree.gpus()["0000:43:00.0"].switch is None


def test_a_function_that_is_not_complete_yet_is_read_again(sysfs):
    tree, directory = PciBus(sysfs.root), sysfs.add(f"{PORT}/0000:16:00.0", GPU)
    os.rename(directory / "class", directory / "later")
    assert list(tree.gpus()) == []
    os.rename(directory / "later", directory / "class")
    assert list(tree.gpus()) == ["0000:16:00.0"]


def test_a_gpu_that_was_swapped_for_another_device_between_two_looks_is_seen(sysfs):
    tree = PciBus(sysfs.root)
    sysfs.add(f"{PORT}/0000:16:00.0", GPU)
    assert list(tree.gpus()) == ["0000:16:00.0"]
    os.rename(sysfs.devices / "0000:16:00.0", sysfs.root / "old")  # so that its inode stays taken
    sysfs.add(f"{PORT}/0000:16:00.0", NETWORK)
    assert list(tree.gpus()) == []


def test_a_sysfs_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "bus/pci").mkdir(parents=True)
    (tmp_path / "bus/pci/devices").write_text("")
    with pytest.raises(NodeError, match="cannot read PCI devices"):
        PciBus(tmp_path).gpus()
