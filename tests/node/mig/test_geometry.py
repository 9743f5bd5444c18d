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
    """A driver that tells these *fields* of the profile with this number."""

    def __init__(self, live, number, **fields):
        super().__init__(live)
        self.number, self.fields = number, fields

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device, profile, version=2):  # noqa: N802
        info = super().nvmlDeviceGetGpuInstanceProfileInfo(device, profile, version)
        if profile == self.number:
            for field, value in self.fields.items():
                setattr(info, field, value)
        return info


@pytest.fixture
def a30(tmp_path):
    return MigNode(tmp_path, board("A30"))


def test_a_profile_has_what_nvml_tells_of_it(tmp_path):
    node = MigNode(tmp_path, board("A100-40-SXM"))
    media = node.profile("1g.5gb+me")
    assert (media.id, media.number, media.slices, media.most) == (20, 7, 1, 1)
    assert media.memory_bytes == 4864 << 20
    assert media.engines == Engines(14, copy=1, decoders=1, encoders=0, jpeg=1, ofa=1)
    assert media.placements == tuple(Placement(start, 1) for start in range(7))
    assert [profile.number for profile in profiles(node)] == sorted(
        profile.number for profile in profiles(node)
    )


def test_profiles_are_the_same_in_both_modes(tmp_path):
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


A30_PROFILES = ["1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"]


@pytest.mark.parametrize(
    ("number", "fields", "missing"),
    [
        pytest.param(7, {"instanceCount": 0}, "1g.6gb+me", id="no instance: left out"),
        pytest.param(7, {"id": 14}, "1g.6gb+me", id="the id of another: left out"),
        pytest.param(7, {"id": 9999}, "1g.6gb+me", id="no placement: left out"),
        pytest.param(7, {"name": b"MIG 1g.6gb"}, None, id="the name of another: with a suffix"),
        pytest.param(1, {"name": b"MIG 1g.6gb"}, "2g.12gb", id="and without a suffix: left out"),
    ],
)
def test_a_mistake_of_the_driver_about_a_profile_is_not_believed(a30, number, fields, missing):
    a30.through(ChangedProfile(a30.live, number, **fields))

    names = sorted(profile.name for profile in profiles(a30))
    assert names == [name for name in A30_PROFILES if name != missing]


def test_there_are_no_more_instances_than_there_is_room_for(a30):
    a30.through(ChangedProfile(a30.live, 1, instanceCount=7))
    assert a30.profile("2g.12gb").most == 2


def test_profiles_that_cannot_be_read_are_logged_once_and_the_gpu_is_read_without(tmp_path, caplog):
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
def test_compute_profiles_of_an_instance_that_vanished_meanwhile_are_read_again(tmp_path, calls):
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


def test_compute_profiles_that_a_driver_does_not_tell_at_once_are_read_again(tmp_path):
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


def test_compute_profiles_are_read_once_for_all_instances_of_a_profile(tmp_path):
    node = MigNode(tmp_path, board(mig=True))
    functions = Leaving(node.live, mig=node.mig)
    partitions = node.through(functions)
    for start in range(3):
        partitions.create(node.gpu, node.key("1g.10gb", start))
    assert functions.calls_left == 99 - 12
