"""Layouts become places on a board: exactly what they say, or nothing and why."""

from collections import Counter
from dataclasses import replace

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from dra_driver.model.gpus import (
    ALL_GPUS,
    GpuUuid,
    GuestRestriction,
    Inventory,
    MigInfo,
    MigInstance,
    Partition,
    PartitionKey,
    UnavailableGpu,
    UnusableGpuInstance,
)
from dra_driver.model.mig_layouts import DesiredLayout, LayoutChange, MigLayout, MigLayoutEntry
from dra_driver.plan.mig.manager.changes import (
    LayoutError,
    capacity_problem,
    place_partitions,
    plan_layout_change,
    requested_profiles,
)
from dra_driver.plan.mig.manager.layouts import (
    built_in_layouts,
    decode_layouts,
    desired_layout,
    format_counts,
    pci_indexes,
)
from tests.builders import gpu
from tests.plan.mig import boards
from tests.plan.mig.boards import legal, mig

A100, A30 = "a100-40", "a30-24"
BOARDS = (A100, A30, "h100-80-sxm", "b200-180", "rtx-pro-6000-96")


def key(name, start):
    return boards.key(mig(A100), name, start)


ONES = [key("1g.5gb", start) for start in range(7)]
HALF = key("3g.20gb", 4)


def board(name=A100, minor=0, *, on=True, present=(), unusable=(), **fields):
    """A GPU with the instances *present*, and GPU instances without a compute instance."""
    return boards.mig_gpu(
        name,
        minor,
        on=on,
        instances=tuple(
            MigInstance(partition_key, number, 0, GpuUuid(f"MIG-{number}"))
            for number, partition_key in enumerate(present)
        ),
        unusable=tuple(UnusableGpuInstance(partition_key, 99, 0) for partition_key in unusable),
        **fields,
    )


def asked(*, on=True, **counts):
    """What a layout wants: ``g1_5gb=2`` is two 1g.5gb."""
    return DesiredLayout(
        "x", on, tuple((f"{name[1]}g.{name[3:]}", count) for name, count in counts.items())
    )


def changing(*arguments):
    """The change that ``plan_layout_change`` plans."""
    change = plan_layout_change(*arguments)
    assert isinstance(change, LayoutChange), change
    return change


def refusing(*arguments):
    """Why ``plan_layout_change`` plans no change."""
    error = plan_layout_change(*arguments)
    assert isinstance(error, LayoutError), error
    return error


def names(keys, name=A100):
    profiles = {profile.id: profile.name for profile in mig(name).profiles}
    return Counter(profiles[partition_key.profile_id] for partition_key in keys)


def is_legal(keys, name=A100):
    """Whether the board takes these partitions."""
    parts = [part for partition_key in keys if (part := mig(name).partition(partition_key))]
    assert all(part.placement in part.profile.placements for part in parts)
    return len(parts) == len([*keys]) and legal(mig(name), parts)


# What each layout says


def test_files_of_mig_parted_become_layouts_and_what_is_wrong_with_one_spoils_no_other():
    file = yaml.safe_load("""
        version: v1
        mig-configs:
          good:
            - device-filter: "0x20B010DE"
              devices: [0, 2]
              mig-enabled: true
              mig-devices: {"2g.10gb": 0, "3g.20gb": 1, "1g.5gb": 2}
            - devices: all
              mig-enabled: false
          bad:
            - devices: all
    """)
    good = (
        MigLayoutEntry(
            True, (("1g.5gb", 2), ("3g.20gb", 1)), frozenset({0, 2}), frozenset({0x20B010DE})
        ),
        MigLayoutEntry(False),
    )

    assert decode_layouts(file, "mig.yaml") == {
        "good": MigLayout("good", good, "mig.yaml"),
        "bad": ("mig-configs.bad[0].mig-enabled: missing",),
    }


FIRST = frozenset({0})
HALVES = (MigLayoutEntry(True, (("1g.5gb", 7),)), MigLayoutEntry(False, indexes=frozenset({1})))
FILTERED = (MigLayoutEntry(True, pci_ids=frozenset({0x20B010DE})),)


@pytest.mark.parametrize(
    ("entries", "node_gpu", "index", "desired"),
    [
        pytest.param(HALVES, board(), 0, asked(g1_5gb=7), id="one entry selects it"),
        pytest.param(HALVES, board(), 1, asked(on=False), id="the last entry counts"),
        pytest.param(HALVES[1:], board(), 0, None, id="no entry selects it"),
        pytest.param(FILTERED, replace(board(), pci_id="0x20B010DE"), 0, asked(), id="PCI ID"),
        pytest.param(FILTERED, replace(board(), pci_id="0x20b010de"), 0, asked(), id="lower case"),
        pytest.param(FILTERED, replace(board(), pci_id="0x20B110DE"), 0, None, id="another ID"),
        pytest.param(FILTERED, board(), 0, None, id="an unknown ID"),
        pytest.param((MigLayoutEntry(True),), gpu(), 0, None, id="all GPUs: not one without MIG"),
        pytest.param(
            (MigLayoutEntry(False, indexes=FIRST),), gpu(), 0, None, id="off, where there is no MIG"
        ),
        pytest.param(
            (MigLayoutEntry(True, indexes=FIRST),), gpu(), 0, asked(), id="on, named by its index"
        ),
    ],
)
def test_a_layout_selects_gpus_as_mig_parted_does(entries, node_gpu, index, desired):
    assert desired_layout(MigLayout("x", entries), node_gpu, index) == desired


@pytest.mark.parametrize(
    ("buses", "unavailable", "indexes"),
    [
        pytest.param(("87", "10", "b7", "47"), (), [2, 0, 3, 1], id="whatever the minor numbers"),
        pytest.param(
            ("47",),
            (
                UnavailableGpu("GPU 0000:10:00.0 (GPU-8)", "it hangs"),
                UnavailableGpu("GPU 0000:87:00.0", "no driver is bound to it"),
                UnavailableGpu("GPU with NVML index 2", "it does not answer"),
                UnavailableGpu(ALL_GPUS, "nothing"),
            ),
            [1],
            id="GPUs that cannot be offered count, where their place is known",
        ),
    ],
)
def test_a_number_in_a_file_is_a_place_on_the_bus(buses, unavailable, indexes):
    gpus = tuple(
        replace(gpu(minor), pci_bus_id=f"0000:{bus}:00.0") for minor, bus in enumerate(buses)
    )

    assert pci_indexes(Inventory(gpus, unavailable)) == {
        node_gpu.uuid: index for node_gpu, index in zip(gpus, indexes, strict=True)
    }


def test_built_in_layouts_are_those_of_mig_parted_and_say_what_each_gpu_can_have():
    ampere, small = board(A100), board(A30, minor=1)

    layouts = built_in_layouts([ampere, small, gpu(2)])

    of_ampere, of_small = (
        {
            name: desired.counts
            for name, layout in layouts.items()
            if (desired := desired_layout(layout, node_gpu, 7)) and desired.on
        }
        for node_gpu in (ampere, small)
    )
    assert of_ampere == {
        "all-1g.10gb": (("1g.10gb", 4),),
        "all-1g.5gb": (("1g.5gb", 7),),
        "all-1g.5gb.me": (("1g.5gb+me", 1),),
        "all-2g.10gb": (("2g.10gb", 3),),
        "all-3g.20gb": (("3g.20gb", 2),),
        "all-4g.20gb": (("4g.20gb", 1),),
        "all-7g.40gb": (("7g.40gb", 1),),
        "all-balanced": (("1g.5gb", 2), ("2g.10gb", 1), ("3g.20gb", 1)),
        "all-enabled": (),
    }
    assert of_small == {
        "all-1g.6gb": (("1g.6gb", 4),),
        "all-1g.6gb.me": (("1g.6gb+me", 1),),
        "all-2g.12gb": (("2g.12gb", 2),),
        "all-2g.12gb.me": (("2g.12gb+me", 1),),
        "all-4g.24gb": (("4g.24gb", 1),),
        "all-balanced": (("1g.6gb", 2), ("2g.12gb", 1)),
        "all-enabled": (),
    }
    assert set(layouts) == {*of_ampere, *of_small, "all-disabled"}
    off = DesiredLayout("all-disabled", False)
    assert desired_layout(layouts["all-disabled"], small, 0) == off
    other = board(A100, minor=2)
    assert {desired_layout(layout, other, 0) for layout in layouts.values()} == {None}


def test_a_board_of_a_size_that_mig_parted_has_no_balance_for_has_none():
    node_gpu = board(A30)
    profiles = tuple(profile for profile in node_gpu.mig.profiles if profile.slices < 4)
    smaller = replace(node_gpu, mig=replace(node_gpu.mig, profiles=profiles))

    assert desired_layout(built_in_layouts([smaller])["all-balanced"], smaller, 0) is None


def test_a_layout_is_shown_as_people_read_it():
    assert format_counts((("1g.5gb", 2), ("3g.20gb", 1))) == "2x 1g.5gb, 1x 3g.20gb"
    assert format_counts(()) == "no partitions"


# Where the partitions go

board_and_counts = st.sampled_from(BOARDS).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.dictionaries(
            st.sampled_from([profile.name for profile in mig(name).profiles]),
            st.integers(1, 4),
            max_size=3,
        ),
    )
)


def possible(name, profiles, placed=()):
    """Whether some places for all of *profiles* are legal, by trying every one."""
    return not profiles or any(
        legal(mig(name), [*placed, part]) and possible(name, profiles[1:], (*placed, part))
        for part in (Partition(profiles[0], place) for place in profiles[0].placements)
    )


@given(board_and_counts)
def test_places_that_are_found_are_legal_and_exactly_what_was_asked_for(case):
    name, counts = case
    profiles, unknown = requested_profiles(mig(name), tuple(counts.items()))
    assert unknown == ()
    assume(len(profiles) <= 8)

    problem = capacity_problem(mig(name), profiles)
    placed = None if problem else place_partitions(mig(name), profiles)

    assert (placed is not None) == possible(name, profiles)
    if placed is not None:
        assert is_legal(placed, name)
        assert names(placed, name) == Counter(counts)


@pytest.mark.parametrize(
    ("name", "counts", "problem"),
    [
        (
            A30,
            (("1g.6gb+me", 1), ("2g.12gb+me", 1)),
            "they need 2 ofa-engines together, and the board has 1",
        ),
        (A100, (("1g.5gb+me", 2),), "there can be 1 of 1g.5gb+me"),
    ],
)
def test_what_the_board_has_too_little_of_is_named(name, counts, problem):
    profiles, _ = requested_profiles(mig(name), counts)

    assert capacity_problem(mig(name), profiles) == problem


# What has to be done

TWO = key("2g.10gb", 2)
UUID = board().uuid


@pytest.mark.parametrize(
    ("node_gpu", "desired", "managed", "claimed", "kept"),
    [
        pytest.param(board(present=ONES), asked(g1_5gb=7), (), (), ONES, id="it is taken over"),
        pytest.param(
            board(present=ONES),
            asked(g1_5gb=7),
            ONES[:6],
            (),
            ONES[:6],
            id="what others added is not taken over",
        ),
        pytest.param(
            board(present=[HALF]),
            asked(g3_20gb=1),
            [key("3g.20gb", 0), HALF],
            (),
            [HALF],
            id="what is gone is not managed",
        ),
        pytest.param(
            board(present=[ONES[0], HALF]),
            asked(g1_5gb=1),
            ONES[:1],
            [HALF],
            ONES[:1],
            id="what was created for claims does not count",
        ),
        pytest.param(board(on=False), asked(on=False), (), (), [], id="off and stays off"),
        pytest.param(board(), asked(), (), (), [], id="MIG mode alone"),
        pytest.param(
            board(present=ONES[:2], fixed=GuestRestriction.ALL),
            asked(g1_5gb=2),
            (),
            (),
            ONES[:2],
            id="a vGPU",
        ),
    ],
)
def test_a_gpu_that_looks_as_desired_is_left_alone(node_gpu, desired, managed, claimed, kept):
    change = changing(node_gpu, desired, managed, claimed)

    assert change.is_nothing
    assert change.managed == change.keep == tuple(kept)


MADE = [HALF, ONES[0]]
SCATTERED = [ONES[1], ONES[5]]  # no half is free between them


@pytest.mark.parametrize(
    ("node_gpu", "desired", "managed", "expected", "created"),
    [
        pytest.param(
            board(on=False),
            asked(g1_5gb=2, g2_10gb=1, g3_20gb=1),
            (),
            LayoutChange(UUID, switch=True),
            {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1},
            id="an empty GPU",
        ),
        pytest.param(
            board(fixed=GuestRestriction.MODE),
            asked(g1_5gb=2),
            (),
            LayoutChange(UUID),
            {"1g.5gb": 2},
            id="one in MIG mode, in a virtual machine",
        ),
        pytest.param(
            board(present=MADE),
            asked(g3_20gb=1, g2_10gb=2),
            MADE,
            LayoutChange(UUID, remove=(ONES[0],), keep=(HALF,)),
            {"2g.10gb": 2},
            id="what an earlier layout created is removed unless it can stay",
        ),
        pytest.param(
            board(present=SCATTERED),
            asked(g3_20gb=1, g1_5gb=2),
            SCATTERED,
            LayoutChange(UUID, remove=tuple(SCATTERED)),
            {"3g.20gb": 1, "1g.5gb": 2},
            id="or moved, where there is no place otherwise",
        ),
        pytest.param(
            board(present=[TWO]),
            asked(g1_5gb=2, g2_10gb=1, g3_20gb=1),
            (),
            LayoutChange(UUID),
            {"1g.5gb": 2, "3g.20gb": 1},
            id="an unmanaged instance of the layout stays and is not managed",
        ),
        pytest.param(
            board(unusable=ONES[:1]),
            asked(g1_5gb=7),
            ONES[:1],
            LayoutChange(UUID, remove=(ONES[0],)),
            {"1g.5gb": 7},
            id="half an instance of ours is created anew",
        ),
        pytest.param(
            board(present=ONES[:2]),
            asked(on=False),
            ONES[:2],
            LayoutChange(UUID, remove=tuple(ONES[:2]), switch=False),
            {},
            id="MIG mode is turned off once what layouts created is removed",
        ),
        pytest.param(
            board(on=False), asked(), (), LayoutChange(UUID, switch=True), {}, id="MIG mode alone"
        ),
    ],
)
def test_a_gpu_is_changed_as_the_layout_says(node_gpu, desired, managed, expected, created):
    change = changing(node_gpu, desired, managed)

    assert replace(change, create=()) == expected
    assert names(change.create) == created
    present = {instance.key for instance in node_gpu.mig.instances} - set(change.remove)
    assert is_legal([*present, *change.create])
    assert change.managed == tuple(sorted((*expected.keep, *change.create)))


@pytest.mark.parametrize(
    ("node_gpu", "desired", "managed", "instances"),
    [
        *(
            pytest.param(board(present=[TWO, ONES[0]]), layout, ONES[:1], "2g.10gb at 2", id=id_)
            for layout, id_ in (
                (asked(g1_5gb=7), "the layout wants none of it"),
                (asked(on=False), "MIG mode is to be off"),
                (asked(), "no partitions at all"),
            )
        ),
        pytest.param(
            board(present=ONES[:3]), asked(g1_5gb=2), (), "1g.5gb at 2", id="one of too many"
        ),
        pytest.param(
            board(present=SCATTERED),
            asked(g1_5gb=2, g3_20gb=1),
            (),
            "1g.5gb at 1, 1g.5gb at 5",
            id="at the wrong places",
        ),
        pytest.param(
            board(present=[PartitionKey(77, 0, 1, 1)]),
            asked(g1_5gb=2),
            (),
            "profile 77 at 0",
            id="of an unknown profile",
        ),
        pytest.param(
            board(unusable=ONES[:1]), asked(g1_5gb=7), (), "1g.5gb at 0", id="half of one"
        ),
        pytest.param(
            boards.mig_gpu(on=True, unusable=(UnusableGpuInstance(ONES[0], 1, 2),)),
            asked(on=False),
            ONES[:1],
            "1g.5gb at 0",
            id="one of ours in which others created compute instances",
        ),
    ],
)
def test_an_unmanaged_instance_in_the_way_is_named(node_gpu, desired, managed, instances):
    assert refusing(node_gpu, desired, managed) == LayoutError(
        "gpu-0 (NVIDIA a100-40) has instances that this driver did not make and that are in the "
        f"way of layout 'x': {instances}; remove them (nvidia-smi mig -dci, then -dgi), or choose "
        "another layout"
    )


IN_GUEST = "gpu-0 (NVIDIA a100-40) cannot be made what layout 'x' says: "
NEEDS_RESET = (
    f"{IN_GUEST}it takes a reset, which this virtual machine cannot make; have it done on the host "
    "before the machine starts, or drain the node, run nvidia-smi -i 0000:18:00.0 -mig {} and "
    "reboot it"
)
VGPU = f"{IN_GUEST}it is a vGPU: its partitions are chosen where the vGPU is made"


@pytest.mark.parametrize(
    ("node_gpu", "desired", "reason"),
    [
        pytest.param(
            board(present=ONES[:2]),
            asked(g1_10gb=2, g2_99gb=1),
            "gpu-0 (NVIDIA a100-40) has no profile 2g.99gb, which layout 'x' has; it has: "
            "1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb, 1g.5gb+me, 1g.10gb",
            id="an unknown profile",
        ),
        pytest.param(
            board(present=ONES[:2]),
            asked(g3_20gb=3),
            "layout 'x' does not fit on gpu-0 (NVIDIA a100-40): 3x 3g.20gb: there can be 2 of "
            "3g.20gb",
            id="too many",
        ),
        pytest.param(
            board(present=ONES[:2]),
            asked(g3_20gb=2, g1_5gb=1),
            "layout 'x' does not fit on gpu-0 (NVIDIA a100-40): 2x 3g.20gb, 1x 1g.5gb: there is no "
            "place for all of them at once",
            id="no place",
        ),
        pytest.param(
            replace(board(), mig=MigInfo(True, True, False)),
            asked(g1_5gb=7),
            "gpu-0 (NVIDIA a100-40) has no profile 1g.5gb, which layout 'x' has; it has: none",
            id="an unknown geometry",
        ),
        pytest.param(
            gpu(),
            asked(g1_5gb=7),
            "gpu-0 (NVIDIA H100 80GB HBM3) cannot be partitioned",
            id="no MIG",
        ),
        pytest.param(
            replace(gpu(), mig_problem="the library is old"),
            asked(g1_5gb=7),
            "gpu-0 (NVIDIA H100 80GB HBM3) cannot be partitioned: the library is old",
            id="no MIG, and why",
        ),
        pytest.param(
            board(on=False, fixed=GuestRestriction.MODE),
            asked(g1_5gb=2),
            NEEDS_RESET.format(1),
            id="on, in a virtual machine",
        ),
        pytest.param(
            board(fixed=GuestRestriction.MODE),
            asked(on=False),
            NEEDS_RESET.format(0),
            id="off, in a virtual machine",
        ),
        pytest.param(
            board(present=ONES[:2], fixed=GuestRestriction.ALL), asked(g1_5gb=3), VGPU, id="a vGPU"
        ),
        pytest.param(
            board(on=False, fixed=GuestRestriction.ALL), asked(g1_5gb=1), VGPU, id="a vGPU, off"
        ),
    ],
)
def test_a_layout_that_a_gpu_cannot_have_changes_nothing_whatever_is_on_it(
    node_gpu, desired, reason
):
    assert refusing(node_gpu, desired, ()) == LayoutError(reason, always=True)


@given(
    st.sets(st.sampled_from(ONES), max_size=7),
    st.sets(st.sampled_from(ONES), max_size=7),
    st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(1, 7)),
)
def test_a_change_leads_to_the_layout_and_leaves_what_is_unmanaged(present, managed, counts):
    desired = DesiredLayout("x", True, tuple(counts.items()))

    change = plan_layout_change(board(present=sorted(present)), desired, managed)

    if isinstance(change, LayoutChange):
        remaining = present - set(change.remove)
        assert set(change.remove) <= managed & present
        assert remaining.isdisjoint(change.create)
        assert is_legal([*sorted(remaining), *change.create])
        assert names([*remaining, *change.create]) == Counter(counts)
        after = board(present=sorted(remaining | set(change.create)))
        assert changing(after, desired, change.managed).is_nothing
