"""A UUID is believed only where the device with this UUID says that it is this instance."""

from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

from dra_driver.node.mig.instances import MigUuidReader

GPU = "GPU-1"


def refuse(number=pynvml.NVML_ERROR_NOT_FOUND):
    raise pynvml.NVMLError(number)


@dataclass
class Driver:
    """NVML's functions: devices by handle, as (name, instances); what is found by place; the
    list."""

    devices: dict[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    places: dict[tuple[int, int], str] = field(default_factory=dict)
    listed: tuple[str, ...] = ()
    reads: int = 0

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802 - NVML's names
        return GPU if handle == "gpu" else self._device(handle)[0]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        gpu, *place = uuid.removeprefix("MIG-").split("/")
        gi, ci = map(int, place)
        device = self.places.get((gi, ci))
        return device if device is not None and gpu == GPU else refuse()

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return len(self.listed)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):  # noqa: N802
        self.reads += 1
        return self.listed[index]

    def nvmlDeviceGetGpuInstanceId(self, handle):  # noqa: N802
        return self._device(handle)[1][0]

    def nvmlDeviceGetComputeInstanceId(self, handle):  # noqa: N802
        return self._device(handle)[1][1]

    def _device(self, handle):
        return self.devices.get(handle) or refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def reader(driver: Any) -> MigUuidReader:
    return MigUuidReader(driver, "gpu")


DEVICES = {"d1": ("MIG-a", (1, 0)), "d2": ("MIG-b", (2, 0))}


@pytest.mark.parametrize("device", ["gpu", "d1", "stale"])
def test_a_uuid_is_the_same_by_whatever_way_it_is_found(device):
    for more in ({"places": {(1, 0): "d1"}}, {"listed": ("d2", "d1")}):
        assert reader(Driver(DEVICES, **more)).of(1, 0, device) == "MIG-a"


@pytest.mark.parametrize("more", [{}, {"places": {(1, 0): "d2"}}, {"listed": ("d2",)}])
@pytest.mark.parametrize("device", ["gpu", "d2"])
def test_a_device_that_says_it_is_another_instance_gives_no_uuid(device, more):
    assert reader(Driver(DEVICES, **more)).of(1, 0, device) is None


def test_a_place_that_leads_to_the_gpu_itself_gives_no_uuid():
    assert reader(Driver(DEVICES, places={(1, 0): "gpu"})).of(1, 0, "gpu") is None


def test_after_a_wrong_device_the_next_instance_is_still_asked_for_its_own():
    uuids = reader(Driver(DEVICES))
    assert [uuids.of(1, 0, "d2"), uuids.of(2, 0, "d2")] == [None, "MIG-b"]


def test_no_two_instances_have_one_uuid():
    devices = {"d1": ("MIG-a", (1, 0)), "d2": ("MIG-a", (2, 0)), "right": ("MIG-b", (2, 0))}
    uuids = reader(Driver(devices, {(2, 0): "right"}))
    assert [uuids.of(1, 0, "d1"), uuids.of(2, 0, "d2")] == ["MIG-a", "MIG-b"]
    uuids = reader(Driver(devices))
    assert [uuids.of(1, 0, "d1"), uuids.of(2, 0, "d2")] == ["MIG-a", None]
    assert uuids.of(1, 0, "d1") == "MIG-a"


@pytest.mark.parametrize(("second", "uuid"), [("MIG-new", None), ("MIG-a", "MIG-a")])
def test_of_two_uuids_for_one_instance_in_the_list_neither_is_believed(second, uuid):
    devices = DEVICES | {"again": (second, (1, 0))}
    uuids = reader(Driver(devices, listed=("d1", "again", "d2")))
    assert [uuids.of(1, 0, "gpu"), uuids.of(2, 0, "gpu")] == [uuid, "MIG-b"]


def test_the_list_is_read_once():
    devices = {f"d{gi}": (f"MIG-{gi}", (gi, 0)) for gi in range(7)}
    driver = Driver(devices, listed=tuple(reversed(devices)))
    uuids = reader(driver)
    assert [uuids.of(gi, 0, "gpu") for gi in range(7)] == [f"MIG-{gi}" for gi in range(7)]
    assert driver.reads == 7
