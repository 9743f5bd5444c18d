"""The device files of MIG instances: found where the driver says, made where they are missing."""

import doctest
import logging
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DeviceFile
from dra_driver.node.driver.device_nodes import DeviceNodes
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.mig import capabilities
from tests.fakes.driver import install

CAPS_MAJOR = 237
GI, CI = "gpu0/mig/gi7", "gpu0/mig/gi7/ci0"


class Kernel:
    """A host whose driver has capabilities, and an nvidia-modprobe that makes their files."""

    def __init__(self, host: Path) -> None:
        self.host = host
        self.runs: list[tuple[str, ...]] = []
        self.files = {f"{host}/dev/{name}": (195, 255) for name in ("nvidiactl", "nvidia-uvm")}
        install(host)

    def have(self, file: str, text: str) -> None:
        path = self.host / "proc/driver/nvidia/capabilities" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, command, timeout_seconds):
        self.runs.append(command.args)
        for flag, file in zip(command.args[::2], command.args[1::2], strict=True):
            assert flag == "-f"
            number = int((self.host / file.lstrip("/")).read_text().split()[1])
            self.files[f"{self.host}/dev/nvidia-caps/nvidia-cap{number}"] = (CAPS_MAJOR, number)
        return ""

    def nodes(self, run=None) -> DeviceNodes:
        return DeviceNodes(DriverRoot("/", self.host), run or self.run, self.files.get)


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    kernel.have(f"{GI}/access", "DeviceFileMinor: 66\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    kernel.have(f"{CI}/access", "DeviceFileMinor: 67\nDeviceFileMode: 292\n")
    kernel.have("mig/monitor", "DeviceFileMinor: 2\nDeviceFileMode: 256\n")
    return kernel


def cap(number):
    path = f"/dev/nvidia-caps/nvidia-cap{number}"
    return DeviceFile(path, path, CAPS_MAJOR, number)


def test_missing_files_are_made_by_the_names_that_the_driver_has(kernel):
    capabilities = kernel.nodes().files([], [CI, GI, CI]).capabilities
    assert capabilities == {GI: cap(66), CI: cap(67)}
    assert kernel.runs == [
        (
            "-f",
            f"/proc/driver/nvidia/capabilities/{GI}/access",
            "-f",
            f"/proc/driver/nvidia/capabilities/{CI}/access",
        )
    ]


class Making:
    """Makes files, or fails with *error*, at the time *now*."""

    def __init__(self, error=None):
        self.error = error
        self.now = 100.0
        self.asked = []
        self.access = capabilities.CapabilityAccess(self.make, lambda: self.now)

    def make(self, name):
        self.asked.append(name)
        if self.error:
            raise self.error


def test_each_file_is_made_sure_of_each_time(caplog):
    making = Making()
    for name in ("mig/config", GI, "mig/config"):
        making.access.have(name)
    assert making.asked == ["mig/config", GI, "mig/config"]
    assert caplog.records == []


def test_a_file_that_cannot_be_made_is_logged_once_and_tried_again_later(caplog):
    making = Making(NodeError("no nvidia-modprobe"))
    with caplog.at_level(logging.WARNING):
        for name in ("mig/config", GI, "mig/config", GI):
            making.access.have(name)
    assert making.asked == ["mig/config", GI]
    assert [(record.capability, record.error) for record in caplog.records] == [
        ("mig/config", "no nvidia-modprobe"),
        (GI, "no nvidia-modprobe"),
    ]
    making.now += 61
    making.error = None
    making.access.have("mig/config")
    making.access.have("mig/config")
    assert making.asked[2:] == ["mig/config"] * 2


def test_a_hanging_nvidia_modprobe_costs_its_time_once_for_all_files():
    making = Making(TimedOut("nvidia-modprobe"))
    for name in ("mig/config", GI, CI):
        making.access.have(name)
    assert making.asked == ["mig/config"]
    making.now += 61
    making.access.have(GI)
    assert making.asked == ["mig/config", GI]


def test_existing_files_are_not_made_again(kernel):
    nodes = kernel.nodes()
    first = nodes.files([], [GI, "mig/monitor"])
    assert nodes.files([], ["mig/monitor", GI]) == first
    assert len(kernel.runs) == 1
    assert list(first.capabilities) == [GI, "mig/monitor"]


def test_a_look_makes_no_files(kernel):
    nodes = kernel.nodes()

    assert nodes.existing([GI, "mig/monitor"]) == {GI: None, "mig/monitor": None}
    assert kernel.runs == []
    nodes.files([], [GI])
    assert nodes.existing([GI, CI]) == {GI: cap(66), CI: None}
    with pytest.raises(NodeError, match="no capability gpu0/mig/gi8"):
        nodes.existing(["gpu0/mig/gi8"])
    (kernel.host / "proc/driver/nvidia/capabilities/mig/monitor").unlink()
    assert nodes.existing(["mig/monitor"]) == {}


def test_a_driver_that_has_no_monitoring_of_instances_needs_none(kernel):
    (kernel.host / "proc/driver/nvidia/capabilities/mig/monitor").unlink()
    assert kernel.nodes().files([], ["mig/monitor"]).capabilities == {}


@pytest.mark.parametrize(
    ("capability", "problem"),
    [
        ("gpu0/mig/gi9", r"no capability gpu0/mig/gi9: .*the MIG instance vanished"),
        (GI, "names no DeviceFileMinor: 'nonsense'"),
    ],
)
def test_a_capability_that_the_driver_has_not_or_garbles_is_an_error(kernel, capability, problem):
    kernel.have(f"{GI}/access", "nonsense\n")
    with pytest.raises(NodeError, match=problem):
        kernel.nodes().files([], [capability])


@pytest.mark.parametrize(
    ("failure", "why"),
    [(None, "reported success"), (NodeError("it may not make nodes"), "it may not make nodes")],
)
def test_a_file_that_is_not_made_is_named_with_how_to_make_it(kernel, failure, why):
    def run(command, timeout_seconds):
        if failure:
            raise failure
        return ""

    with pytest.raises(NodeError, match=why) as raised:
        kernel.nodes(run).files([], [GI])
    assert "/dev/nvidia-caps/nvidia-cap66 (gpu0/mig/gi7)" in str(raised.value)
    assert f"nvidia-modprobe -f /proc/driver/nvidia/capabilities/{GI}/access" in str(raised.value)


def test_making_a_file_is_not_waited_for_without_end(kernel):
    def run(command, timeout_seconds):
        raise TimedOut("nvidia-modprobe did not end")

    with pytest.raises(TimedOut):
        kernel.nodes(run).files([], [GI])


def test_the_doc_is_true():
    assert doctest.testmod(capabilities).failed == 0
