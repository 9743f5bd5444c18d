"""How a board can be partitioned is what its driver says, as far as that can be."""

import ctypes
import logging

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import Engines, Placement
from dra_driver.sim.node_spec import board_specs
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.mig_node import MigNode, board

WITH_MIG = sorted(name for name, spec in board_specs().items() if spec.mig)
OLD = {"nvmlDeviceGetGpuInstanceProfileInfoV": "FUNCTION_NOT_FOUND"}


def profiles(node):
    return node.static.mig_profiles


class ChangedProfile(SimulatedNvml):
    """A driver that says something else of one profile, by its number."""

    def __init__(self, live, number, **fields):
        super().__init__(live)
        self.number, self.fields = number, fields

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device, profile, version=2):  # noqa: N802
        info = super().nvmlDeviceGetGpuInstanceProfileInfo(device, profile, version)
        if profile == self.number:
            for field, value in self.fields.items():
                setattr(info, field, value)
        return info


def names_with(node, number, **fields):
    """The profiles of an A30 whose driver says this of one of them."""
    node.through(ChangedProfile(node.live, number, **fields))
    return [profile.name for profile in profiles(node)]


@pytest.fixture
def a30(tmp_path):
    return MigNode(tmp_path, board("A30"))


def test_a_profile_is_all_that_is_said_of_it(tmp_path):
    node = MigNode(tmp_path, board("A100-40-SXM"))
    media = node.profile("1g.5gb+me")
    assert (media.id, media.number, media.slices, media.most) == (20, 7, 1, 1)
    assert media.memory_bytes == 4864 << 20
    assert media.engines == Engines(14, copy=1, decoders=1, encoders=0, jpeg=1, ofa=1)
    assert media.placements == tuple(Placement(start, 1) for start in range(7))
    assert [profile.number for profile in profiles(node)] == sorted(
        profile.number for profile in profiles(node)
    )


def test_the_mode_does_not_matter(tmp_path):
    node = MigNode(tmp_path, board(mig=True))
    on = profiles(node)
    node.partitions.set_mode(node.gpu, False)
    assert profiles(node) == on


@pytest.mark.parametrize("name", WITH_MIG)
def test_a_library_that_names_no_profiles_gets_the_names_of_one_that_does(tmp_path, name):
    names = {profile.id: profile.name for profile in profiles(MigNode(tmp_path, board(name)))}
    old = {
        profile.id: profile.name for profile in profiles(MigNode(tmp_path, board(name, fails=OLD)))
    }
    assert old == names


def test_a_library_without_mig_has_no_profiles(tmp_path):
    fails = {"nvmlDeviceGetMigMode": "FUNCTION_NOT_FOUND"}
    node = MigNode(tmp_path, board(fails=fails))
    assert (node.dynamic.mig_on, profiles(node)) == (None, ())


def test_why_the_profiles_of_a_board_are_not_known_is_told(tmp_path):
    def problem(**fails):
        return MigNode(tmp_path, board(fails=fails)).static.mig_problem

    placements = "nvmlDeviceGetGpuInstancePossiblePlacements"
    assert problem() == ""
    assert "lacks functions for MIG" in problem(nvmlDeviceGetMigMode="FUNCTION_NOT_FOUND")
    assert "lacks functions for MIG" in problem(**{placements: "FUNCTION_NOT_FOUND"})
    assert (
        problem(**{placements: "UNKNOWN"}) == "NVML does not tell its MIG profiles: Unknown Error"
    )
    assert problem(nvmlDeviceGetMigMode="NOT_SUPPORTED") == ""  # such a board has no MIG


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        pytest.param({"instanceCount": 0}, 4, id="no instance"),
        pytest.param({"id": 14}, 4, id="the id of another"),
        pytest.param({"id": 9999}, 4, id="no placement"),
    ],
)
def test_a_profile_that_cannot_be_is_left_out(a30, fields, count):
    names = names_with(a30, 7, **fields)
    assert len(names) == count
    assert "1g.6gb+me" not in names


def test_a_name_that_another_profile_has_gets_what_its_number_stands_for(a30):
    assert sorted(names_with(a30, 7, name=b"MIG 1g.6gb")) == [
        "1g.6gb",
        "1g.6gb+me",
        "2g.12gb",
        "2g.12gb+me",
        "4g.24gb",
    ]


def test_of_two_that_cannot_be_told_apart_there_is_one(a30):
    assert names_with(a30, 1, name=b"MIG 1g.6gb").count("1g.6gb") == 1


def test_there_are_no_more_instances_than_there_is_room_for(a30):
    names_with(a30, 1, instanceCount=7)
    assert a30.profile("2g.12gb").most == 2


def test_profiles_that_cannot_be_read_are_logged_and_the_gpu_is_there_all_the_same(
    tmp_path, caplog
):
    fails = {"nvmlDeviceGetGpuInstancePossiblePlacements": "NO_PERMISSION"}
    node = MigNode(tmp_path, board(fails=fails))
    with caplog.at_level(logging.WARNING):
        assert profiles(node) == profiles(node) == ()
    assert caplog.text.count("MIG profiles not read") == 1


def test_a_gpu_that_is_lost_is_an_error(tmp_path):
    node = MigNode(tmp_path, board(fails={"nvmlDeviceGetGpuInstanceProfileInfoV": "GPU_IS_LOST"}))
    node.nvml.system()
    assert "GPU is lost" in str(node.nvml.static_infos([0])[0])


class Leaving(SimulatedNvml):
    """A driver whose GPU instance vanishes once so much was asked about how it can be divided."""

    calls_left = 99

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(  # noqa: N802
        self,
        device,
        profile,
        engProfile,  # noqa: N803
        version=2,
    ):
        self.calls_left -= 1
        if self.calls_left == 0:
            self.nvmlGpuInstanceDestroy(device)
        return super().nvmlGpuInstanceGetComputeInstanceProfileInfo(
            device, profile, engProfile, version
        )


def _multiprocessors(functions, handle):
    return functions.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount


@pytest.mark.parametrize("calls", range(1, 10))
def test_what_was_half_read_of_an_instance_that_vanished_is_read_again(tmp_path, calls):
    node = MigNode(tmp_path, board(mig=True))
    functions = Leaving(node.live, mig=node.mig)
    key = node.key("1g.20gb", 2)  # of one slice, with two profiles of so many slices
    partitions = node.through(functions)
    place = pynvml.c_nvmlGpuInstancePlacement_t(key.start, key.size)
    node.nvml.on_gpu(
        node.gpu,
        "creating it as somebody else",
        lambda nvml, gpu: nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            gpu, key.profile_id, ctypes.byref(place)
        ),
    )
    functions.calls_left = calls
    assert node.dynamic.instances == ()
    assert partitions.keys(node.gpu) == ()

    made = partitions.create(node.gpu, key)

    assert node.dynamic.instances == (made,)
    assert node.nvml.on_gpu(made.uuid, "counting", _multiprocessors) == 26  # all there are


def test_what_a_driver_does_not_say_at_once_is_asked_again(tmp_path):
    class Slow(SimulatedNvml):
        ready = False

        def nvmlGpuInstanceGetComputeInstanceProfileInfo(  # noqa: N802
            self,
            device,
            profile,
            engProfile,  # noqa: N803
            version=2,
        ):
            if profile and not self.ready:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return super().nvmlGpuInstanceGetComputeInstanceProfileInfo(
                device, profile, engProfile, version
            )

    node = MigNode(tmp_path, board(mig=True))
    functions = Slow(node.live, mig=node.mig)
    key = node.key("3g.40gb", 4)
    partitions = node.through(functions)
    with pytest.raises(NodeError, match="has no compute instance that is all of it"):
        partitions.create(node.gpu, key)
    functions.ready = True
    made = partitions.create(node.gpu, key)
    assert node.dynamic.instances == (made,)


def test_what_was_read_of_one_holds_for_all_that_are_alike(tmp_path):
    node = MigNode(tmp_path, board(mig=True))
    functions = Leaving(node.live, mig=node.mig)
    partitions = node.through(functions)
    for start in range(3):
        partitions.create(node.gpu, node.key("1g.10gb", start))
    assert functions.calls_left == 99 - 12
