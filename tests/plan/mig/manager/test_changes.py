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
from dra_driver.sim.mig.geometry import board_geometry, fits_on_board
from tests.builders import gpu

A100, A30, H100, B200, RTX = "A100-40-SXM", "A30", "H100-80-SXM", "B200", "RTX-PRO-6000"
BOARDS = (A100, A30, H100, B200, RTX)


def table(product):
    """What the board can be cut into."""
    geometry = board_geometry(product)
    assert geometry is not None
    return geometry


def changing(*given):
    """What ``plan_layout_change`` finds to be done."""
    change = plan_layout_change(*given)
    assert isinstance(change, LayoutChange), change
    return change


def refusing(*given):
    """Why ``plan_layout_change`` finds nothing to be done."""
    error = plan_layout_change(*given)
    assert isinstance(error, LayoutError), error
    return error


def mig(
    product=A100, *, on=True, switches=False, there=(), unusable=(), fixed=GuestRestriction.NOTHING
):
    profiles = table(product).profiles
    return MigInfo(
        on,
        on,
        switches,
        profiles,
        tuple(
            MigInstance(key, number, 0, GpuUuid(f"MIG-{number}"))
            for number, key in enumerate(there)
        ),
        tuple(UnusableGpuInstance(key, 99, 0) for key in unusable),
        fixed,
    )


def board(product=A100, minor=0, **fields):
    return gpu(minor, product_name=f"NVIDIA {product}", mig=mig(product, **fields))


def key(name, start, product=A100):
    profile = table(product).named(name)
    assert profile is not None
    place = next(placement for placement in profile.placements if placement.start == start)
    return Partition(profile, place).key


def asked(*, on=True, **counts):
    """What a layout wants: ``g1_5gb=2`` is two 1g.5gb."""
    named = {name[1:].replace("_", "."): count for name, count in counts.items()}
    requested = tuple(
        (f"{name[0]}g.{name.partition('.')[2]}", count) for name, count in named.items()
    )
    return DesiredLayout("x", on, requested)


ONES = [key("1g.5gb", start) for start in range(7)]


def names(keys, product=A100):
    profiles = {profile.id: profile.name for profile in table(product).profiles}
    return Counter(profiles[partition_key.profile_id] for partition_key in keys)


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

    layouts = decode_layouts(file, "mig.yaml")

    assert layouts["good"] == MigLayout(
        "good",
        (
            MigLayoutEntry(
                True, (("1g.5gb", 2), ("3g.20gb", 1)), frozenset({0, 2}), frozenset({0x20B010DE})
            ),
            MigLayoutEntry(False),
        ),
        "mig.yaml",
    )
    assert layouts["bad"] == ("mig-configs.bad[0].mig-enabled: missing",)


def layout(*entries):
    return MigLayout("x", entries)


def test_the_last_entry_that_selects_a_gpu_holds_for_it():
    halves = layout(
        MigLayoutEntry(True, (("1g.5gb", 7),)),
        MigLayoutEntry(False, indexes=frozenset({1})),
    )

    assert desired_layout(halves, board(), 0) == DesiredLayout("x", True, (("1g.5gb", 7),))
    assert desired_layout(halves, board(), 1) == DesiredLayout("x", False)


def test_a_gpu_that_no_entry_selects_stays_as_it_is():
    only = layout(MigLayoutEntry(True, indexes=frozenset({1})))

    assert desired_layout(only, board(), 0) is None


def test_a_number_in_a_file_is_a_place_on_the_bus_whatever_the_minor_numbers_are():
    gpus = tuple(
        replace(gpu(minor), pci_bus_id=f"0000:{bus}:00.0")
        for minor, bus in enumerate(("87", "10", "b7", "47"))
    )

    assert pci_indexes(Inventory(gpus)) == {
        gpus[1].uuid: 0,
        gpus[3].uuid: 1,
        gpus[0].uuid: 2,
        gpus[2].uuid: 3,
    }


def test_gpus_that_cannot_be_offered_have_their_places_where_it_is_known_which():
    offered = replace(gpu(0), pci_bus_id="0000:47:00.0")
    unavailable = (
        UnavailableGpu("GPU 0000:10:00.0 (GPU-8)", "it hangs"),
        UnavailableGpu("GPU 0000:87:00.0", "no driver is bound to it"),
        UnavailableGpu("GPU with NVML index 2", "it does not answer"),
        UnavailableGpu(ALL_GPUS, "nothing"),
    )

    assert pci_indexes(Inventory((offered,), unavailable)) == {offered.uuid: 1}


def test_built_in_layouts_mean_a_gpu_wherever_it_is():
    gpu, other = board(A100), board(A100, minor=1)
    layout = built_in_layouts([gpu])["all-1g.5gb"]

    assert desired_layout(layout, gpu, 7) is not None
    assert desired_layout(layout, other, 0) is None


@pytest.mark.parametrize(
    ("pci_id", "is_meant"),
    [("0x20B010DE", True), ("0x20b010de", True), ("0x20B110DE", False), ("", False)],
)
def test_a_filter_is_compared_with_the_pci_id_of_the_gpu(pci_id, is_meant):
    filtered = layout(MigLayoutEntry(True, pci_ids=frozenset({0x20B010DE})))

    assert (desired_layout(filtered, replace(board(), pci_id=pci_id), 0) is not None) is is_meant


def test_what_is_said_of_all_gpus_is_not_meant_for_those_that_cannot_be_cut():
    assert desired_layout(layout(MigLayoutEntry(True)), gpu(), 0) is None
    assert desired_layout(layout(MigLayoutEntry(False, indexes=frozenset({0}))), gpu(), 0) is None
    assert desired_layout(
        layout(MigLayoutEntry(True, indexes=frozenset({0}))), gpu(), 0
    ) == DesiredLayout("x", True)


def test_built_in_layouts_are_called_as_mig_parted_calls_them():
    layouts = built_in_layouts([board(A100), board(A30, minor=1), gpu(2)])

    assert set(layouts) == {
        "all-1g.10gb",
        "all-1g.5gb",
        "all-1g.5gb.me",
        "all-1g.6gb",
        "all-1g.6gb.me",
        "all-2g.10gb",
        "all-2g.12gb",
        "all-2g.12gb.me",
        "all-3g.20gb",
        "all-4g.20gb",
        "all-4g.24gb",
        "all-7g.40gb",
        "all-balanced",
        "all-disabled",
        "all-enabled",
    }


def test_built_in_layouts_say_what_each_gpu_can_have_of_them():
    ampere, small = board(A100), board(A30, minor=1)
    layouts = built_in_layouts([ampere, small])

    assert desired_layout(layouts["all-1g.5gb"], ampere, 0) == DesiredLayout(
        "all-1g.5gb", True, (("1g.5gb", 7),)
    )
    assert desired_layout(layouts["all-1g.5gb"], small, 0) is None
    me = desired_layout(layouts["all-1g.5gb.me"], ampere, 0)
    assert me == DesiredLayout("all-1g.5gb.me", True, (("1g.5gb+me", 1),))
    assert desired_layout(layouts["all-balanced"], ampere, 0) == DesiredLayout(
        "all-balanced", True, (("1g.5gb", 2), ("2g.10gb", 1), ("3g.20gb", 1))
    )
    assert desired_layout(layouts["all-balanced"], small, 0) == DesiredLayout(
        "all-balanced", True, (("1g.6gb", 2), ("2g.12gb", 1))
    )
    assert desired_layout(layouts["all-disabled"], small, 0) == DesiredLayout("all-disabled", False)
    assert desired_layout(layouts["all-enabled"], ampere, 0) == DesiredLayout("all-enabled", True)


def test_a_board_of_a_size_that_mig_parted_has_no_balance_for_has_none():
    gpu = board(A30)
    profiles = tuple(profile for profile in gpu.mig.profiles if profile.slices < 4)
    unusable = replace(gpu, mig=replace(gpu.mig, profiles=profiles))

    assert desired_layout(built_in_layouts([unusable])["all-balanced"], unusable, 0) is None


@pytest.mark.parametrize("product", BOARDS)
def test_every_built_in_layout_fits_on_the_boards_that_it_is_for(product):
    gpu = board(product)

    for layout in built_in_layouts([gpu]).values():
        meant = desired_layout(layout, gpu, 0)
        assert meant is not None
        assert isinstance(plan_layout_change(gpu, meant, ()), LayoutChange), layout.name


def test_a_layout_is_shown_as_people_read_it():
    assert format_counts((("1g.5gb", 2), ("3g.20gb", 1))) == "2x 1g.5gb, 1x 3g.20gb"
    assert format_counts(()) == "no partitions"


# Where the partitions go

board_and_counts = st.sampled_from(BOARDS).flatmap(
    lambda product: st.tuples(
        st.just(product),
        st.dictionaries(
            st.sampled_from([profile.name for profile in table(product).profiles]),
            st.integers(1, 4),
            max_size=3,
        ),
    )
)


def is_legal(product, keys):
    """As the board takes them, one after the other."""
    geometry, there = table(product), []
    for partition_key in keys:
        profile = geometry.profile(partition_key.profile_id)
        assert profile is not None
        part = Partition(profile, partition_key.placement)
        assert partition_key.placement in profile.placements
        if not fits_on_board(geometry, there, part):
            return False
        there.append(part)
    return True


def possible(product, profiles):
    """Whether some places for all of *profiles* are legal, by trying every one."""
    geometry = table(product)

    def search(profiles, there):
        if not profiles:
            return True
        for spot in profiles[0].placements:
            part = Partition(profiles[0], spot)
            if fits_on_board(geometry, there, part) and search(profiles[1:], [*there, part]):
                return True
        return False

    return search(list(profiles), [])


@given(board_and_counts)
def test_places_that_are_found_are_legal_and_exactly_what_was_asked_for(case):
    product, counts = case
    mig_info = mig(product)
    profiles, unknown = requested_profiles(mig_info, tuple(counts.items()))
    assert unknown == ()
    assume(len(profiles) <= 8)

    placed = None if capacity_problem(mig_info, profiles) else place_partitions(mig_info, profiles)

    assert (placed is not None) == possible(product, profiles)
    if placed is not None:
        assert is_legal(product, placed)
        assert names(placed, product) == Counter(counts)


@given(
    st.sets(st.sampled_from(ONES), max_size=5),
    st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(1, 3)),
)
def test_what_is_there_stays_where_it_is(there, counts):
    mig_info = mig(A100)
    profiles, _ = requested_profiles(mig_info, tuple(counts.items()))

    placed = place_partitions(mig_info, profiles, there)

    if placed is not None:
        assert is_legal(A100, [*there, *placed])
        assert names(placed) == Counter(counts)


def test_more_than_the_board_has_engines_for_is_refused_before_a_place_is_looked_for():
    mig_info = mig(A30)
    profiles, _ = requested_profiles(mig_info, (("1g.6gb+me", 1), ("2g.12gb+me", 1)))

    words = capacity_problem(mig_info, profiles)
    assert words == "they need 2 ofa-engines together, and the board has 1"


def test_more_of_a_profile_than_a_board_can_have_is_refused():
    mig_info = mig(A100)
    profiles, _ = requested_profiles(mig_info, (("1g.5gb+me", 2),))

    assert capacity_problem(mig_info, profiles) == "there can be 1 of 1g.5gb+me"


# What has to be done


def test_an_empty_gpu_is_cut_as_the_layout_says():
    change = changing(board(on=False), asked(g1_5gb=2, g2_10gb=1, g3_20gb=1), ())

    assert (change.remove, change.switch, change.keep) == ((), True, ())
    assert names(change.create) == {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
    assert change.managed == change.create
    assert not change.is_nothing


def test_a_gpu_that_looks_as_wanted_is_left_alone_and_taken_over():
    gpu = board(there=ONES)

    change = changing(gpu, asked(g1_5gb=7), ())

    assert change.is_nothing
    assert change.managed == tuple(ONES)


def test_what_somebody_else_added_to_our_layout_is_not_taken_over():
    gpu = board(there=ONES)

    assert changing(gpu, asked(g1_5gb=7), ONES[:6]).managed == tuple(ONES[:6])


def test_what_is_gone_is_no_longer_ours():
    gpu = board(there=[key("3g.20gb", 4)])

    change = changing(gpu, asked(g3_20gb=1), [key("3g.20gb", 0), key("3g.20gb", 4)])

    assert change.is_nothing
    assert change.managed == (key("3g.20gb", 4),)


def test_what_an_earlier_layout_made_is_removed_unless_it_can_stay():
    made = [key("3g.20gb", 4), key("1g.5gb", 0)]

    change = changing(board(there=made), asked(g3_20gb=1, g2_10gb=2), made)

    assert change == LayoutChange(
        board().uuid,
        remove=(key("1g.5gb", 0),),
        create=(key("2g.10gb", 0), key("2g.10gb", 2)),
        keep=(key("3g.20gb", 4),),
    )


def test_what_was_made_moves_where_the_layout_has_no_place_otherwise():
    made = [key("1g.5gb", 1), key("1g.5gb", 5)]  # no half is free between them

    change = changing(board(there=made), asked(g3_20gb=1, g1_5gb=2), made)

    assert change.remove == tuple(made)
    assert names(change.create) == {"3g.20gb": 1, "1g.5gb": 2}


def test_a_foreign_instance_that_the_layout_wants_stays_and_the_rest_is_cut_around_it():
    foreign = key("2g.10gb", 2)

    change = changing(board(there=[foreign]), asked(g1_5gb=2, g2_10gb=1, g3_20gb=1), ())

    assert change.remove == ()
    assert names(change.create) == {"1g.5gb": 2, "3g.20gb": 1}
    assert is_legal(A100, [foreign, *change.create])
    assert foreign not in change.managed


@pytest.mark.parametrize(
    "want",
    [
        pytest.param(asked(g1_5gb=7), id="the layout wants none of it"),
        pytest.param(asked(on=False), id="MIG mode is to be off"),
        pytest.param(DesiredLayout("x", True), id="no partitions at all"),
    ],
)
def test_a_foreign_instance_in_the_way_is_named_and_nothing_is_done(want):
    error = refusing(board(there=[key("2g.10gb", 2), *ONES[:1]]), want, ONES[:1])

    assert not error.always
    assert error.reason.startswith(
        "gpu-0 (NVIDIA A100-40-SXM) has instances that this driver did not make and that are in "
        "the way of layout 'x': 2g.10gb at 2; remove them"
    )


def test_a_foreign_instance_that_is_one_of_too_many_is_in_the_way():
    error = refusing(board(there=ONES[:3]), asked(g1_5gb=2), ())

    assert "1g.5gb at 2" in error.reason


def test_a_foreign_instance_at_the_wrong_place_is_in_the_way():
    there = [key("1g.5gb", 1), key("1g.5gb", 5)]

    error = refusing(board(there=there), asked(g1_5gb=2, g3_20gb=1), ())

    assert "1g.5gb at 1, 1g.5gb at 5" in error.reason


def test_a_foreign_instance_of_an_unknown_profile_is_called_by_its_number():
    strange = PartitionKey(77, 0, 1, 1)

    assert "profile 77 at 0" in refusing(board(there=[strange]), asked(g1_5gb=2), ()).reason


def test_half_an_instance_of_somebody_else_is_in_the_way_and_half_a_one_of_ours_is_cut_anew():
    half = ONES[0]
    gpu = board(unusable=[half])

    assert refusing(gpu, asked(g1_5gb=7), ())
    change = changing(gpu, asked(g1_5gb=7), [half])
    assert change.remove == (half,)
    assert change.create == tuple(ONES)


def test_an_instance_of_ours_in_which_somebody_made_compute_instances_is_in_the_way():
    gpu = board()
    used = UnusableGpuInstance(ONES[0], 1, 2)

    error = refusing(
        replace(gpu, mig=replace(gpu.mig, unusable=(used,))), asked(on=False), ONES[:1]
    )

    assert "1g.5gb at 0" in error.reason


def test_what_is_cut_for_claims_is_no_business_of_the_layout():
    claimed = key("3g.20gb", 4)
    gpu = board(there=[ONES[0], claimed])

    change = changing(gpu, asked(g1_5gb=1), ONES[:1], [claimed])

    assert change.is_nothing
    assert change.managed == tuple(ONES[:1])


def test_mig_mode_goes_off_once_what_layouts_made_is_removed():
    change = changing(board(there=ONES[:2]), asked(on=False), ONES[:2])

    assert change == LayoutChange(board().uuid, remove=tuple(ONES[:2]), switch=False)
    assert change.managed == ()


def test_mig_mode_that_is_off_stays_off():
    assert changing(board(on=False), asked(on=False), ()).is_nothing


def test_mig_mode_alone_can_be_wanted():
    assert plan_layout_change(board(on=False), DesiredLayout("x", True), ()) == LayoutChange(
        board().uuid, switch=True
    )
    assert changing(board(), DesiredLayout("x", True), ()).is_nothing


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (
            asked(g1_10gb=2, g2_99gb=1),
            "gpu-0 (NVIDIA A100-40-SXM) has no profile 2g.99gb, which layout 'x' has; it has: "
            "1g.5gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb, 1g.5gb+me, 1g.10gb",
        ),
        (
            asked(g3_20gb=3),
            "layout 'x' does not fit on gpu-0 (NVIDIA A100-40-SXM): 3x 3g.20gb: there can be 2 of "
            "3g.20gb",
        ),
        (
            asked(g3_20gb=2, g1_5gb=1),
            "layout 'x' does not fit on gpu-0 (NVIDIA A100-40-SXM): 2x 3g.20gb, 1x 1g.5gb: there "
            "is no place for all of them at once",
        ),
    ],
)
def test_a_layout_that_the_board_cannot_have_changes_nothing_whatever_is_on_it(want, words):
    error = refusing(board(there=ONES[:2]), want, ONES[:2])

    assert error == LayoutError(words, always=True)


def test_a_gpu_without_mig_can_have_no_layout():
    assert plan_layout_change(gpu(), asked(g1_5gb=7), ()) == LayoutError(
        "gpu-0 (NVIDIA H100 80GB HBM3) cannot be partitioned", always=True
    )


def test_a_gpu_that_cannot_have_a_layout_says_why_where_it_is_known():
    assert plan_layout_change(
        replace(gpu(), mig_problem="the library is old"), asked(g1_5gb=7), ()
    ) == LayoutError(
        "gpu-0 (NVIDIA H100 80GB HBM3) cannot be partitioned: the library is old",
        always=True,
    )


def test_a_board_whose_geometry_is_not_known_has_no_profiles():
    gpu = replace(board(), mig=MigInfo(True, True, False))

    assert refusing(gpu, asked(g1_5gb=7), ()).reason.endswith("it has: none")


@given(
    st.sets(st.sampled_from(ONES), max_size=7),
    st.sets(st.sampled_from(ONES), max_size=7),
    st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(1, 7)),
)
def test_a_change_leads_to_the_layout_and_leaves_what_is_foreign(there, made, counts):
    gpu = board(there=sorted(there))
    want = DesiredLayout("x", True, tuple(counts.items()))

    change = plan_layout_change(gpu, want, made)

    if isinstance(change, LayoutChange):
        remaining = there - set(change.remove)
        assert set(change.remove) <= made & there
        assert remaining.isdisjoint(change.create)
        assert is_legal(A100, [*sorted(remaining), *change.create])
        assert names([*remaining, *change.create]) == Counter(counts)
        again = plan_layout_change(
            board(there=sorted(remaining | set(change.create))), want, change.managed
        )
        assert isinstance(again, LayoutChange)
        assert again.is_nothing


# In virtual machines


@pytest.mark.parametrize("on", [False, True])
def test_a_layout_changes_no_mode_in_a_virtual_machine_that_cannot_reset_the_board(on):
    layout = asked(on=not on, **({} if on else {"g1_5gb": 2}))

    why = refusing(board(on=on, fixed=GuestRestriction.MODE), layout, ())

    assert why.always
    assert why.reason.startswith(
        "gpu-0 (NVIDIA A100-40-SXM) cannot be made what layout 'x' says: it takes a reset, which "
        "this virtual machine cannot make; "
    )
    assert f"-mig {int(not on)} and reboot" in why.reason


def test_a_layout_cuts_a_board_of_a_virtual_machine_that_is_in_mig_mode():
    assert changing(board(fixed=GuestRestriction.MODE), asked(g1_5gb=2), ()) == changing(
        board(), asked(g1_5gb=2), ()
    )


def test_a_layout_takes_over_what_is_cut_of_a_vgpu_and_changes_nothing():
    vgpu = board(there=ONES[:2], fixed=GuestRestriction.ALL)

    assert changing(vgpu, asked(g1_5gb=2), ()).keep == tuple(ONES[:2])
    assert "it is a vGPU" in refusing(vgpu, asked(g1_5gb=3), ()).reason
    assert (
        "it is a vGPU"
        in refusing(board(on=False, fixed=GuestRestriction.ALL), asked(g1_5gb=1), ()).reason
    )
