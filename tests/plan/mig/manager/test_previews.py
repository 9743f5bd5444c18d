"""A GPU is shown as its layout makes it, unless that cannot be, or has to wait."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid, Inventory, MigInstance, UnusableGpuInstance
from dra_driver.model.mig_layouts import (
    DesiredLayout,
    LayoutChange,
    LayoutInstance,
    LayoutOutcome,
    LayoutState,
    MigState,
)
from dra_driver.model.offer import ApiFeatures
from dra_driver.plan.mig.manager.changes import LayoutError, plan_layout_change, preview_layout
from dra_driver.plan.mig.manager.layouts import built_in_layouts, desired_layout
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_devices
from tests.plan.mig.boards import boards, mig, mig_gpu, partition, profile

HALVES = DesiredLayout("halves", True, (("3g.20gb", 2),))
OFF = DesiredLayout("all-disabled", False)


def shown(gpu, layout=HALVES, book=None, claimed=frozenset(), waits=""):
    return preview_layout(gpu, layout, book or MigState(), claimed, waits)


def with_instances(*where):
    instances = tuple(
        MigInstance(partition(mig(), name, start).key, number, 0, GpuUuid(f"MIG-{number}"))
        for number, (name, start) in enumerate(where)
    )
    return mig_gpu(on=True, pending=True, instances=instances)


def misfit(gpu, layout=HALVES):
    error = plan_layout_change(gpu, layout, ())
    assert isinstance(error, LayoutError)
    return error.reason


def known(gpu):
    """A book that says that all of it was made by a layout."""
    return MigState(
        {gpu.uuid: tuple(LayoutInstance(i.key, i.gi, i.uuid) for i in gpu.mig.instances)}
    )


def test_an_idle_gpu_is_shown_cut_and_in_mig_mode_with_instances_that_have_no_uuid_yet():
    after, outcome = shown(mig_gpu())

    assert outcome is None
    assert (after.mig.on, after.mig.pending) == (True, True)
    assert [(instance.key.start, instance.uuid) for instance in after.mig.instances] == [
        (0, ""),
        (4, ""),
    ]


def test_what_is_yet_to_be_cut_is_published_without_a_uuid_and_otherwise_as_what_is_there():
    after, _ = shown(mig_gpu())
    there = with_instances(("3g.20gb", 0), ("3g.20gb", 4))

    to_come, now = (
        published_devices(build_offer(Inventory((gpu,)), profile(), ApiFeatures(), {}))
        for gpu in (after, there)
    )

    assert [device["name"] for device in to_come] == [
        *("gpu-0-mig-3g20gb-9-4", "gpu-0-mig-3g20gb-9-0", "gpu-0-mon"),
    ]
    for coming, existing in zip(to_come[:2], now[:2], strict=True):
        assert existing["attributes"].pop("uuid")["string"].startswith("MIG-")
        assert coming == existing


def test_a_gpu_that_looks_so_already_is_shown_as_it_is():
    gpu = with_instances(("3g.20gb", 0), ("3g.20gb", 4))

    assert shown(gpu) == (gpu, LayoutOutcome("halves", LayoutState.SUCCESS))
    assert shown(gpu, waits="a claim holds it") == (
        gpu,
        LayoutOutcome("halves", LayoutState.SUCCESS),
    )


def test_what_a_layout_made_gives_way_and_what_fits_stays():
    gpu = with_instances(("1g.5gb", 6), ("3g.20gb", 0))
    half = UnusableGpuInstance(partition(gpu.mig, "1g.5gb", 4).key, 7, 0)
    gpu = replace(gpu, mig=replace(gpu.mig, unusable=(half,)))
    book = known(gpu)
    book = MigState({gpu.uuid: (*book.instances[gpu.uuid], LayoutInstance(half.key, 7))})

    after, outcome = shown(gpu, book=book)

    assert outcome is None
    assert [instance.uuid for instance in after.mig.instances] == ["MIG-1", ""]
    assert after.mig.unusable == ()


def test_a_layout_without_partitions_shows_the_whole_gpu():
    gpu = with_instances(("1g.5gb", 6))

    after, outcome = shown(gpu, OFF, known(gpu))

    assert (after, outcome) == (mig_gpu(), None)


def test_a_gpu_that_a_claim_holds_is_shown_as_it_is_with_what_it_waits_for():
    assert shown(mig_gpu(), waits="claims hold it") == (
        mig_gpu(),
        LayoutOutcome("halves", LayoutState.PENDING, "claims hold it"),
    )


def test_what_is_cut_for_claims_is_in_the_way_of_nothing_but_has_to_end():
    gpu = with_instances(("1g.5gb", 6))
    claimed = frozenset({(gpu.uuid, gpu.mig.instances[0].key)})

    preview = shown(gpu, claimed=claimed, waits="claims hold it")

    assert preview == (gpu, LayoutOutcome("halves", LayoutState.PENDING, "claims hold it"))


@pytest.mark.parametrize("waits", ["", "claims hold it"])
def test_a_layout_that_never_fits_fails_whatever_holds_the_gpu(waits):
    layout = DesiredLayout("thirds", True, (("3g.20gb", 3),))

    after, outcome = shown(mig_gpu(), layout, waits=waits)

    assert after == mig_gpu()
    assert outcome.state is LayoutState.FAILED
    assert outcome.reason == misfit(mig_gpu(), layout)


def test_instances_of_somebody_else_are_in_the_way_once_nothing_is_waited_for():
    gpu = with_instances(("7g.40gb", 0))
    reason = misfit(gpu)

    assert shown(gpu) == (gpu, LayoutOutcome("halves", LayoutState.FAILED, reason))
    assert shown(gpu, waits="claims hold it") == (
        gpu,
        LayoutOutcome("halves", LayoutState.PENDING, f"claims hold it; then: {reason}"),
    )


@pytest.mark.parametrize("state", [LayoutState.FAILED, LayoutState.PENDING])
def test_what_the_book_says_of_a_layout_that_is_not_applied_counts(state):
    recorded = LayoutOutcome("halves", state, "MIG mode cannot be turned on")

    assert shown(mig_gpu(), book=MigState(outcomes={mig_gpu().uuid: recorded})) == (
        mig_gpu(),
        recorded,
    )


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param(
            LayoutOutcome("halves", LayoutState.SUCCESS), id="it was applied, and is gone"
        ),
        pytest.param(
            LayoutOutcome("thirds", LayoutState.FAILED, "it does not fit"), id="of another layout"
        ),
    ],
)
def test_what_else_the_book_says_does_not_count(recorded):
    after, outcome = shown(mig_gpu(), book=MigState(outcomes={mig_gpu().uuid: recorded}))

    assert outcome is None
    assert len(after.mig.instances) == 2


@given(st.data())
def test_who_looks_at_what_is_shown_finds_the_layout_applied(data):
    gpu = mig_gpu(data.draw(st.sampled_from(sorted(boards()))))
    layouts = built_in_layouts([gpu])
    layout = desired_layout(layouts[data.draw(st.sampled_from(sorted(layouts)))], gpu, 0)
    assert layout is not None

    after, outcome = shown(gpu, layout)

    if outcome is not None:  # a board that is as it should be
        assert (after, outcome.state) == (gpu, LayoutState.SUCCESS)
    change = plan_layout_change(after, layout, ())
    assert isinstance(change, LayoutChange) and change.is_nothing
    assert shown(after, layout) == (after, LayoutOutcome(layout.layout, LayoutState.SUCCESS))
