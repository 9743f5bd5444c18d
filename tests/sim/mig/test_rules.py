"""Whatever is created and destroyed, a simulated board allows what an independent model allows."""

from ctypes import byref, c_uint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.sim.mig.geometry import COLUMNS, geometry_documents
from tests.fakes.simulated import Node

FAMILIES = sorted(geometry_documents())
ENGINES = COLUMNS[7:]


class Model:
    """A board as a row of units, with what the table says and nothing of the simulation's rules."""

    def __init__(self, family):
        entry = geometry_documents()[family]
        self.rows = [dict(zip(COLUMNS, row, strict=True)) for row in entry["profiles"].values()]
        self.total = {name: max(row[name] for row in self.rows) for name in ENGINES}
        self.slices = entry["slices"]
        self.instances = []  # (row, start)

    def legal(self, row, start):
        after = [*self.instances, (row, start)]
        units = [unit for profile, begin in after for unit in range(begin, begin + profile["size"])]
        return (
            start in row["starts"]
            and len(units) == len(set(units))
            and sum(profile["id"] == row["id"] for profile, _ in after) <= row["most"]
            and sum(profile["slices"] for profile, _ in after) <= self.slices
            and all(
                sum(profile[name] for profile, _ in after) <= self.total[name] for name in ENGINES
            )
        )


def listed(nvml, device, row):
    """Starts of the instances of a profile, as NVML lists them."""
    handles, count = (pynvml.c_nvmlGpuInstance_t * row["most"])(), c_uint()
    nvml.nvmlDeviceGetGpuInstances(device, row["id"], handles, byref(count))
    infos = [nvml.nvmlGpuInstanceGetInfo(handle) for handle in handles[: count.value]]
    assert all(info.profileId == row["id"] for info in infos)
    assert all(info.placement.size == row["size"] for info in infos)
    return sorted(info.placement.start for info in infos)


def room(model, row):
    """How many more of a profile fit, tried from the first place on."""
    before, made = list(model.instances), 0
    for start in row["starts"]:
        if model.legal(row, start):
            model.instances.append((row, start))
            made += 1
    model.instances = before
    return made


class Board:
    """A simulated board beside its model."""

    def __init__(self, family, directory):
        product = geometry_documents()[family]["products"][0]
        gpu = {"product": product, "bus_id": "0000:01:00.0", "mig": True}
        self.nvml = Node(Path(directory), {"gpus": [gpu]}).functions
        self.nvml.nvmlInit()
        self.device = self.nvml.nvmlDeviceGetHandleByIndex(0)
        self.model = Model(family)
        self.pointers: dict[tuple[int, int], Any] = {}

    def create(self, row, start):
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, row["size"])
        create = self.nvml.nvmlDeviceCreateGpuInstanceWithPlacement
        if self.model.legal(row, start):
            self.pointers[row["id"], start] = create(self.device, row["id"], byref(place))
            self.model.instances.append((row, start))
        else:
            with pytest.raises(pynvml.NVMLError_InsufficientResources):
                create(self.device, row["id"], byref(place))

    def destroy(self, which):
        row, start = self.model.instances.pop(which)
        self.nvml.nvmlGpuInstanceDestroy(self.pointers.pop((row["id"], start)))

    def compare(self):
        for row in self.model.rows:
            starts = sorted(start for profile, start in self.model.instances if profile is row)
            assert listed(self.nvml, self.device, row) == starts
            capacity = self.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(self.device, row["id"])
            assert capacity == room(self.model, row)
        ids = [self.nvml.nvmlGpuInstanceGetInfo(pointer).id for pointer in self.pointers.values()]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_board_refuses_what_the_model_refuses_and_nothing_else(family, data):
    with TemporaryDirectory() as directory:
        board = Board(family, directory)
        for _ in range(data.draw(st.integers(1, 14))):
            count = len(board.model.instances)
            if count and data.draw(st.integers(0, 3)) == 0:
                board.destroy(data.draw(st.integers(0, count - 1)))
            else:
                row = data.draw(st.sampled_from(board.model.rows))
                board.create(row, data.draw(st.sampled_from(row["starts"])))
            board.compare()


def test_engines_that_are_there_once_go_to_one_instance():
    model = Model("RTX-PRO-6000")
    everything, single, without = (
        next(row for row in model.rows if row["number"] == number) for number in (15, 0, 13)
    )
    assert model.legal(everything, 0)
    model.instances.append((everything, 0))
    assert not model.legal(single, 3)  # it has a decoder, and all of them are taken
    assert model.legal(without, 3)
