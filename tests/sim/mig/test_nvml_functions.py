"""Simulated MIG has pynvml's functions and refuses what hardware refuses."""

from ctypes import POINTER, byref, c_uint, cast, pointer

import pynvml
import pytest

from dra_driver.sim.mig.identifiers import MigUuidParts, parse_mig_uuid, uuid_tag
from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.nvml import SimulatedNvml
from tests.fakes.simulated import Node, h100

A100 = {"product": "A100-40-SXM", "bus_id": "0000:43:00.0"}
GIB = 1 << 30
OLD_CI = 8  # NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL: in nvml.h, and on no board


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, {"gpus": [h100("1b"), dict(A100, mig=True)]})


@pytest.fixture
def nvml(node):
    node.functions.nvmlInit()
    return node.functions


@pytest.fixture
def hopper(nvml):
    """MIG mode is off."""
    return nvml.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def ampere(nvml):
    """MIG mode is on."""
    return nvml.nvmlDeviceGetHandleByIndex(1)


def at(start, size):
    return byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))


def create_gi(nvml, device, profile, start, size):
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile, at(start, size))


def refused(error, ask, *arguments):
    with pytest.raises(getattr(pynvml, f"NVMLError_{error}")):
        ask(*arguments)


def listed(ask, owner, number, kind, most=7):
    handles, count = (kind * most)(), c_uint()
    ask(owner, number, handles, byref(count))
    return list(handles[: count.value])


def gpu_instances(nvml, device, profile):
    return listed(nvml.nvmlDeviceGetGpuInstances, device, profile, pynvml.c_nvmlGpuInstance_t)


def test_profiles_are_told_by_number_with_the_id_that_creates_them(nvml, ampere):
    info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(ampere, 7)
    assert (info.name, info.id, info.sliceCount, info.instanceCount) == ("MIG 1g.5gb+me", 20, 1, 1)
    assert (info.memorySizeMB, info.multiprocessorCount, info.copyEngineCount) == (4864, 14, 1)
    assert (info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount) == (1, 0, 1, 1)
    first = nvml.nvmlDeviceGetGpuInstanceProfileInfo(ampere, 7, version=1)
    assert isinstance(first, pynvml.c_nvmlGpuInstanceProfileInfo_t)
    assert (first.id, first.memorySizeMB) == (20, 4864)
    ask = nvml.nvmlDeviceGetGpuInstanceProfileInfo
    refused("NotSupported", ask, ampere, pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE)
    refused("InvalidArgument", ask, ampere, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
    refused("FunctionNotFound", ask, ampere, 0, 3)


def test_an_old_library_does_not_know_the_names(node, nvml, ampere):
    node.change(
        gpu=1, fails={"nvmlDeviceGetGpuInstanceProfileInfoV": "NVML_ERROR_FUNCTION_NOT_FOUND"}
    )
    refused("FunctionNotFound", nvml.nvmlDeviceGetGpuInstanceProfileInfo, ampere, 0)
    assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(ampere, 0, version=1).id == 19


def test_placements_are_told_whether_the_mode_is_on_or_off(nvml, hopper, ampere):
    ask, kind = nvml.nvmlDeviceGetGpuInstancePossiblePlacements, pynvml.c_nvmlGpuInstancePlacement_t
    for device in (hopper, ampere):
        count = c_uint()
        assert ask(device, 14, None, byref(count)) == pynvml.NVML_SUCCESS
        places = (kind * count.value)()
        ask(device, 14, places, byref(count))
        assert [(place.start, place.size) for place in places] == [(0, 2), (2, 2), (4, 2)]
    first = (kind * 3)()
    ask(hopper, 14, cast(first, POINTER(kind)), pointer(c_uint()))
    assert [placement.start for placement in first] == [0, 2, 4]
    refused("InsufficientSize", ask, hopper, 14, (kind * 2)(), byref(c_uint()))
    refused("NotSupported", ask, hopper, 3, None, byref(c_uint()))
    refused("InvalidArgument", ask, hopper, 14, None, None)
    refused("InvalidArgument", ask, hopper, 14, 5, byref(c_uint()))


def test_an_instance_is_created_filled_found_and_destroyed_again(nvml, ampere):
    made = create_gi(nvml, ampere, 9, 4, 4)
    info = nvml.nvmlGpuInstanceGetInfo(made)
    assert (info.profileId, info.placement.start, info.placement.size) == (9, 4, 4)
    compute = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(made, 2, 0)
    assert (compute.id, compute.sliceCount, compute.multiprocessorCount) == (2, 3, 42)
    assert compute.name == "MIG 3g.20gb"
    filled = nvml.nvmlGpuInstanceCreateComputeInstance(made, compute.id)

    [instance] = gpu_instances(nvml, ampere, 9)
    assert nvml.nvmlGpuInstanceGetInfo(instance).id == info.id
    assert nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(ampere, info.id)).id == 1
    assert gpu_instances(nvml, ampere, 5) == []
    ask, kind = nvml.nvmlGpuInstanceGetComputeInstances, pynvml.c_nvmlComputeInstance_t
    [inside] = listed(ask, instance, 2, kind)
    about = nvml.nvmlComputeInstanceGetInfo_v2(inside)
    assert (about.id, about.profileId, about.placement.size) == (0, 2, 3)
    assert nvml.nvmlGpuInstanceGetInfo(about.gpuInstance).id == info.id

    assert nvml.nvmlComputeInstanceDestroy(filled) == pynvml.NVML_SUCCESS
    assert nvml.nvmlGpuInstanceDestroy(instance) == pynvml.NVML_SUCCESS
    for ask in (nvml.nvmlGpuInstanceGetInfo, nvml.nvmlGpuInstanceDestroy):
        refused("InvalidArgument", ask, made)
    refused("InvalidArgument", nvml.nvmlComputeInstanceDestroy, filled)
    refused("NotFound", nvml.nvmlDeviceGetGpuInstanceById, ampere, info.id)


def test_what_is_created_again_at_the_same_place_is_another_instance(nvml, ampere):
    first = create_gi(nvml, ampere, 19, 3, 1)
    nvml.nvmlGpuInstanceDestroy(first)
    second = create_gi(nvml, ampere, 19, 3, 1)
    assert nvml.nvmlGpuInstanceGetInfo(second).id == 7
    refused("InvalidArgument", nvml.nvmlGpuInstanceGetInfo, first)


@pytest.mark.parametrize(
    ("profile", "start", "size"),
    [(19, 7, 1), (19, 0, 2), (14, 1, 2), (9, 2, 4), (3, 0, 4), (999, 0, 1)],
    ids=["beyond", "another size", "between", "a half across", "a number, no id", "no profile"],
)
def test_a_place_that_a_profile_does_not_have_is_invalid(nvml, ampere, profile, start, size):
    refused("InvalidArgument", create_gi, nvml, ampere, profile, start, size)


def test_a_placement_that_is_no_pointer_is_invalid(nvml, ampere):
    create = nvml.nvmlDeviceCreateGpuInstanceWithPlacement
    place = pynvml.c_nvmlGpuInstancePlacement_t(0, 1)
    refused("InvalidArgument", create, ampere, 19, place)
    refused("InvalidArgument", create, ampere, 19, None)
    assert create(ampere, 19, pointer(place))


def test_without_a_placement_the_first_free_one_is_taken(nvml, ampere):
    create_gi(nvml, ampere, 14, 0, 2)
    made = nvml.nvmlDeviceCreateGpuInstance(ampere, 14)
    assert nvml.nvmlGpuInstanceGetInfo(made).placement.start == 2
    refused("InsufficientResources", nvml.nvmlDeviceCreateGpuInstance, ampere, 5)


def test_nothing_is_created_while_the_mode_is_off(nvml, hopper):
    refused("NotSupported", create_gi, nvml, hopper, 19, 0, 1)
    refused("NotSupported", gpu_instances, nvml, hopper, 19)
    refused("NotSupported", nvml.nvmlDeviceGetGpuInstanceRemainingCapacity, hopper, 19)
    refused("NotSupported", nvml.nvmlDeviceGetMigDeviceHandleByIndex, hopper, 0)
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(hopper) == 0


def test_no_compute_instance_is_there_before_its_gpu_instance_and_none_outlives_it(nvml, ampere):
    create = nvml.nvmlGpuInstanceCreateComputeInstance
    refused("InvalidArgument", create, pynvml.c_nvmlGpuInstance_t(), 0)
    refused("InvalidArgument", create, None, 0)
    made = create_gi(nvml, ampere, 19, 0, 1)
    inside = create(made, 0)
    refused("InvalidArgument", create, inside, 0)
    refused("InUse", nvml.nvmlGpuInstanceDestroy, made)
    nvml.nvmlComputeInstanceDestroy(inside)
    nvml.nvmlGpuInstanceDestroy(made)
    refused("InvalidArgument", create, made, 0)


def test_compute_instances_share_what_their_gpu_instance_has(nvml, ampere):
    made = create_gi(nvml, ampere, 5, 0, 4)
    two = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(made, 1, 0)
    assert (two.name, two.instanceCount, two.multiprocessorCount) == ("MIG 2c.4g.20gb", 2, 28)
    first = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(made, 1, 0, version=1)
    assert (first.id, first.sharedCopyEngineCount) == (1, 4)
    place = pynvml.c_nvmlComputeInstancePlacement_t(2, 2)
    create = nvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
    assert create(made, 1, byref(place))
    refused("InsufficientResources", create, made, 1, byref(place))
    refused("InsufficientResources", nvml.nvmlGpuInstanceCreateComputeInstance, made, 3)
    assert nvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(made, 0) == 2
    places, count = (pynvml.c_nvmlComputeInstancePlacement_t * 4)(), c_uint()
    nvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(made, 0, places, byref(count))
    assert [place.start for place in places[: count.value]] == [0, 1, 2, 3]
    place.start = 1
    refused("InvalidArgument", create, made, 1, byref(place))


@pytest.mark.parametrize(
    ("number", "engine", "error"),
    [
        (2, 0, "NotSupported"),
        (4, 0, "NotSupported"),
        (OLD_CI, 0, "NotSupported"),
        (9, 0, "InvalidArgument"),
        (0, 1, "InvalidArgument"),
    ],
)
def test_a_four_slice_instance_has_no_compute_instances_of_other_kinds(
    nvml, ampere, number, engine, error
):
    made = create_gi(nvml, ampere, 5, 0, 4)
    ask = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    refused(error, ask, made, number, engine)


def test_a_mig_device_is_a_device_with_what_its_instance_has(node, nvml, ampere):
    nvml.nvmlGpuInstanceCreateComputeInstance(create_gi(nvml, ampere, 14, 2, 2), 1)
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(ampere, 0)
    uuid, parent = nvml.nvmlDeviceGetUUID(device), nvml.nvmlDeviceGetUUID(ampere)
    assert parse_mig_uuid(uuid) == MigUuidParts(
        minor=1, number=1, start=2, gi=3, ci=0, tag=uuid_tag(parent)
    )
    assert nvml.nvmlDeviceGetHandleByUUID(uuid) == device
    assert nvml.nvmlDeviceGetName(device) == "NVIDIA A100-SXM4-40GB MIG 2g.10gb"
    assert nvml.nvmlDeviceGetMemoryInfo(device).total == 9856 << 20
    attributes = nvml.nvmlDeviceGetAttributes(device)
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (28, 9856)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (2, 2)
    assert nvml.nvmlDeviceGetGpuInstanceId(device) == 3
    assert nvml.nvmlDeviceGetComputeInstanceId(device) == 0
    assert nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) == ampere
    assert [bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)) for handle in (device, ampere)] == [
        True,
        False,
    ]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(ampere) == 7
    refused("NotFound", nvml.nvmlDeviceGetMigDeviceHandleByIndex, ampere, 1)
    refused("InvalidArgument", nvml.nvmlDeviceGetMigDeviceHandleByIndex, ampere, 7)
    refused("NotSupported", nvml.nvmlDeviceGetGpuInstanceId, ampere)
    for ask in (nvml.nvmlDeviceGetMigMode, nvml.nvmlDeviceGetMinorNumber):
        refused("InvalidArgument", ask, device)


def test_the_handle_of_a_mig_device_dies_with_it(nvml, ampere):
    made = create_gi(nvml, ampere, 19, 0, 1)
    inside = nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(ampere, 0)
    uuid = nvml.nvmlDeviceGetUUID(device)
    nvml.nvmlComputeInstanceDestroy(inside)
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, device)
    refused("NotFound", nvml.nvmlDeviceGetHandleByUUID, uuid)
    nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, device)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid


def test_an_instance_with_a_process_stays_and_lists_it_as_the_gpu_does(node, nvml, ampere):
    made = create_gi(nvml, ampere, 19, 0, 1)
    inside = nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    create_gi(nvml, ampere, 19, 1, 1)
    node.change(gpu=1, processes=[{"pid": 42, "memory_bytes": GIB, "gi": 7}])
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(ampere, 0)
    for handle in (device, ampere):
        [process] = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        assert (process.pid, process.usedGpuMemory) == (42, GIB)
        assert (process.gpuInstanceId, process.computeInstanceId) == (7, 0)
        assert nvml.nvmlDeviceGetMemoryInfo(handle).used == GIB
    refused("InUse", nvml.nvmlComputeInstanceDestroy, inside)
    refused("InUse", nvml.nvmlGpuInstanceDestroy, made)
    node.change(gpu=1, processes=[{"pid": 42, "memory_bytes": GIB, "gi": 8}])
    assert nvml.nvmlDeviceGetComputeRunningProcesses(device) == []
    nvml.nvmlComputeInstanceDestroy(inside)
    nvml.nvmlGpuInstanceDestroy(made)


def test_since_hopper_the_mode_changes_at_once_or_not_at_all(node, nvml, hopper):
    assert nvml.nvmlDeviceSetMigMode(hopper, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(hopper) == [1, 1]
    create_gi(nvml, hopper, 0, 0, 8)
    refused("InUse", nvml.nvmlDeviceSetMigMode, hopper, 0)
    assert nvml.nvmlDeviceSetMigMode(hopper, 1) == pynvml.NVML_SUCCESS
    nvml.nvmlGpuInstanceDestroy(nvml.nvmlDeviceGetGpuInstanceById(hopper, 0))
    nvml.nvmlDeviceSetMigMode(hopper, 0)
    node.change(gpu=0, processes=[{"pid": 1, "memory_bytes": 0}])
    refused("InUse", nvml.nvmlDeviceSetMigMode, hopper, 1)
    assert nvml.nvmlDeviceGetMigMode(hopper) == [0, 0]
    refused("InvalidArgument", nvml.nvmlDeviceSetMigMode, hopper, 2)


def test_before_hopper_the_mode_waits_for_a_reset_where_the_board_is_used(node, nvml, ampere):
    node.change(gpu=1, processes=[{"pid": 1, "memory_bytes": 0}])
    assert nvml.nvmlDeviceSetMigMode(ampere, 0) == pynvml.NVML_ERROR_IN_USE
    assert nvml.nvmlDeviceGetMigMode(ampere) == [1, 0]
    node.change(gpu=1, processes=[])
    assert nvml.nvmlDeviceGetMigMode(ampere) == [1, 0]
    assert nvml.nvmlDeviceSetMigMode(ampere, 0) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(ampere) == [0, 0]


def test_a_mode_that_is_pending_can_be_taken_back(node, nvml, ampere):
    node.change(gpu=1, mig_reset="impossible")
    assert nvml.nvmlDeviceSetMigMode(ampere, 0) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert nvml.nvmlDeviceGetMigMode(ampere) == [1, 0]
    assert nvml.nvmlDeviceSetMigMode(ampere, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(ampere) == [1, 1]


def test_a_board_that_is_passed_through_needs_a_reset_once_its_mode_was_to_change(node, nvml):
    node.change(gpu=1, virtualization="passthrough", mig=False)
    ampere = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetVirtualizationMode(ampere) == 1
    assert nvml.nvmlDeviceGetMemoryInfo(ampere).total
    assert nvml.nvmlDeviceSetMigMode(ampere, 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert nvml.nvmlDeviceGetMigMode(ampere) == [0, 1]
    refused("ResetRequired", nvml.nvmlDeviceGetMemoryInfo, ampere)
    assert nvml.nvmlDeviceSetMigMode(ampere, 0) == pynvml.NVML_SUCCESS
    refused("ResetRequired", nvml.nvmlDeviceGetMemoryInfo, ampere)
    assert nvml.nvmlDeviceGetUUID(ampere)


def test_a_board_that_is_passed_through_is_partitioned_like_any_other(node, nvml, ampere):
    node.change(gpu=0, virtualization="passthrough")
    node.change(gpu=1, virtualization="passthrough")
    assert nvml.nvmlGpuInstanceGetInfo(create_gi(nvml, ampere, 9, 4, 4)).placement.start == 4
    hopper = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceSetMigMode(hopper, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(hopper) == [1, 1]
    assert nvml.nvmlDeviceGetMemoryInfo(hopper).total


def test_the_guest_of_a_vgpu_neither_switches_nor_partitions_it(node, nvml, ampere):
    instance = create_gi(nvml, ampere, 9, 4, 4)
    for gpu in (0, 1):
        node.change(gpu=gpu, virtualization="vgpu")
    hopper = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetVirtualizationMode(hopper) == 2
    refused("NotSupported", nvml.nvmlDeviceSetMigMode, hopper, 1)
    refused("NotSupported", nvml.nvmlDeviceSetMigMode, ampere, 0)
    refused("NotSupported", create_gi, nvml, ampere, 19, 0, 1)
    refused("NotSupported", nvml.nvmlGpuInstanceDestroy, instance)
    assert nvml.nvmlDeviceGetMigMode(ampere) == [1, 1]


def test_persistence_mode_is_as_the_node_file_says(node, nvml, ampere):
    assert nvml.nvmlDeviceGetPersistenceMode(ampere) == 0
    node.change(gpu=1, persistence=True)
    assert nvml.nvmlDeviceGetPersistenceMode(ampere) == 1


def test_only_root_may_change_anything_or_see_the_instances(tmp_path):
    node = Node(
        tmp_path, {"gpus": [dict(A100, mig=True, instances=[{"profile": "2g.10gb", "start": 0}])]}
    )
    root = [True]
    nvml = SimulatedNvml(node.live, mig=MigStateStore(is_root=lambda: root[0]))
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    instance = nvml.nvmlDeviceGetGpuInstanceById(device, 3)
    inside = nvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    root.clear()
    root.append(False)
    refused("NoPermission", nvml.nvmlDeviceSetMigMode, device, 0)
    refused("NoPermission", create_gi, nvml, device, 19, 4, 1)
    refused("NoPermission", nvml.nvmlGpuInstanceDestroy, instance)
    refused("NoPermission", nvml.nvmlComputeInstanceDestroy, inside)
    refused("NoPermission", nvml.nvmlDeviceGetGpuInstanceById, device, 3)
    refused("NoPermission", nvml.nvmlGpuInstanceGetComputeInstanceById, instance, 0)
    count = pynvml.c_uint(4)
    listed = (pynvml.c_nvmlGpuInstance_t * 4)()
    refused("NoPermission", nvml.nvmlDeviceGetGpuInstances, device, 14, byref(listed), byref(count))
    assert nvml.nvmlDeviceGetMigMode(device) == [1, 1]


def test_a_board_without_mig_supports_none_of_it(tmp_path):
    nvml = Node(tmp_path, {"gpus": [{"product": "T4", "bus_id": "0000:00:1e.0"}]}).functions
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    refused("NotSupported", nvml.nvmlDeviceSetMigMode, device, 1)
    refused("NotSupported", nvml.nvmlDeviceGetGpuInstanceProfileInfo, device, 0)
    refused("NotSupported", create_gi, nvml, device, 19, 0, 1)
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0


def test_instances_of_others_come_and_go_with_the_node_file(node, nvml, ampere):
    node.change(gpu=1, instances=[{"profile": "3g.20gb", "start": 4}])
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(ampere, 0)
    assert nvml.nvmlDeviceGetName(device).endswith("MIG 3g.20gb")
    refused("InsufficientResources", create_gi, nvml, ampere, 14, 4, 2)
    node.change(gpu=1, instances=[])
    refused("InvalidArgument", nvml.nvmlDeviceGetName, device)
    assert create_gi(nvml, ampere, 14, 4, 2)


def test_a_mig_device_keeps_its_index_and_leaves_a_hole(nvml, ampere):
    made = [create_gi(nvml, ampere, 19, start, 1) for start in range(3)]
    inside = [nvml.nvmlGpuInstanceCreateComputeInstance(instance, 0) for instance in made]
    at = nvml.nvmlDeviceGetMigDeviceHandleByIndex
    uuids = [nvml.nvmlDeviceGetUUID(at(ampere, index)) for index in range(3)]
    nvml.nvmlComputeInstanceDestroy(inside[1])
    refused("NotFound", at, ampere, 1)
    assert [nvml.nvmlDeviceGetUUID(at(ampere, index)) for index in (0, 2)] == uuids[::2]
    nvml.nvmlGpuInstanceCreateComputeInstance(made[1], 0)
    assert nvml.nvmlDeviceGetUUID(at(ampere, 1)) == uuids[1]


def test_what_another_process_removed_is_listed_until_something_takes_its_place(node, nvml, ampere):
    node.change(gpu=1, instances=[{"profile": "3g.20gb", "start": 4}])
    at = nvml.nvmlDeviceGetMigDeviceHandleByIndex
    device = at(ampere, 0)
    uuid = nvml.nvmlDeviceGetUUID(device)
    node.change(gpu=1, instances=[])
    assert at(ampere, 0) == device
    assert nvml.nvmlDeviceGetUUID(device) == uuid
    assert nvml.nvmlDeviceGetGpuInstanceId(device) == 1
    refused("NotFound", nvml.nvmlDeviceGetHandleByUUID, uuid)
    nvml.nvmlGpuInstanceCreateComputeInstance(create_gi(nvml, ampere, 14, 0, 2), 1)
    assert nvml.nvmlDeviceGetUUID(at(ampere, 0)) != uuid
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, device)


def test_an_instance_says_that_it_is_on_its_gpu_and_is_found_by_its_place(nvml, ampere):
    made = create_gi(nvml, ampere, 19, 0, 1)
    inside = nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    parent, device = nvml.nvmlDeviceGetUUID(ampere), nvml.nvmlDeviceGetMigDeviceHandleByIndex
    for info in (nvml.nvmlGpuInstanceGetInfo(made), nvml.nvmlComputeInstanceGetInfo_v2(inside)):
        assert nvml.nvmlDeviceGetUUID(info.device) == parent
        assert nvml.nvmlDeviceGetMigMode(info.device) == [1, 1]
    assert nvml.nvmlDeviceGetHandleByUUID(f"MIG-{parent}/7/0") == device(ampere, 0)
    refused("NotFound", nvml.nvmlDeviceGetHandleByUUID, f"MIG-{parent}/7/1")
    refused("InvalidArgument", nvml.nvmlDeviceGetUUID, pynvml.c_nvmlDevice_t())


def test_an_instance_of_others_has_to_wait_until_its_place_is_free(node, nvml, ampere):
    made = create_gi(nvml, ampere, 14, 4, 2)
    node.change(gpu=1, instances=[{"profile": "3g.20gb", "start": 4}])
    assert gpu_instances(nvml, ampere, 9) == []
    nvml.nvmlGpuInstanceDestroy(made)
    assert len(gpu_instances(nvml, ampere, 9)) == 1


def test_an_instance_of_others_that_is_destroyed_does_not_come_back_by_itself(node, nvml, ampere):
    node.change(gpu=1, instances=[{"profile": "3g.20gb", "start": 4, "compute": []}])
    nvml.nvmlGpuInstanceDestroy(nvml.nvmlDeviceGetGpuInstanceById(ampere, 1))
    node.change(gpu=0, numa_node=1)
    refused("NotFound", nvml.nvmlDeviceGetGpuInstanceById, ampere, 1)


def test_an_instance_of_others_can_have_any_compute_instances(node, nvml, ampere):
    node.change(gpu=1, instances=[{"profile": "3g.20gb", "start": 0, "compute": [2, 1]}])
    names = [
        nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetMigDeviceHandleByIndex(ampere, index))
        for index in (0, 1)
    ]
    assert [name.rpartition(" ")[2] for name in names] == ["2c.3g.20gb", "1c.3g.20gb"]


def test_the_node_file_switches_the_mode_as_somebody_else_would(node, nvml, hopper, ampere):
    create_gi(nvml, ampere, 19, 0, 1)
    node.change(gpu=1, mig=False)
    assert nvml.nvmlDeviceGetMigMode(ampere) == [0, 0]
    node.change(gpu=1, mig=True)
    assert gpu_instances(nvml, ampere, 19) == []
    nvml.nvmlDeviceSetMigMode(hopper, 1)
    node.change(gpu=0, numa_node=1)
    assert nvml.nvmlDeviceGetMigMode(hopper) == [1, 1]


def test_pointers_of_an_earlier_session_are_invalid(nvml, ampere):
    made = create_gi(nvml, ampere, 19, 0, 1)
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    refused("InvalidArgument", nvml.nvmlGpuInstanceGetInfo, made)


def test_a_fault_can_concern_one_function_of_an_instance(node, nvml, ampere):
    made = create_gi(nvml, ampere, 19, 0, 1)
    node.change(gpu=1, fails={"nvmlGpuInstanceCreateComputeInstance": "UNKNOWN"})
    refused("Unknown", nvml.nvmlGpuInstanceCreateComputeInstance, made, 0)
    assert nvml.nvmlGpuInstanceDestroy(made) == pynvml.NVML_SUCCESS
