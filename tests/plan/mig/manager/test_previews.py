"""A GPU is shown as its layout makes it, unless that cannot be, or has to wait."""

from dataclasses import replace

import pytest

from dra_driver.model.gpus import Inventory
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
from tests.plan.mig.boards import boards, instance, mig, mig_gpu, profile, unusable

HALVES = DesiredLayout("halves", True, (("3g.20gb", 2),))
THIRDS = DesiredLayout("thirds", True, (("3g.20gb", 3),))
OFF = DesiredLayout("all-disabled", False)
DONE = LayoutOutcome("halves", LayoutState.SUCCESS)


def preview(gpu, layout=HALVES, state=None, claimed=frozenset(), waits=""):
    return preview_layout(gpu, layout, state or MigState(), claimed, waits)


def with_instances(*places, **fields):
    instances = tuple(instance(mig(), name, start, gi) for gi, (name, start) in enumerate(places))
    return mig_gpu(on=True, instances=instances, **fields)


def refusal(gpu, layout=HALVES):
    error = plan_layout_change(gpu, layout, ())
    assert isinstance(error, LayoutError)
    return error.reason


def created_by_layouts(gpu):
    """A state that says that layouts created all of it."""
    recorded = [LayoutInstance(i.key, i.gi, i.uuid) for i in gpu.mig.instances]
    recorded += [LayoutInstance(i.key, i.gi) for i in gpu.mig.unusable]
    return MigState({gpu.uuid: tuple(recorded)})


IDLE = mig_gpu()
SMALL, WHOLE = with_instances(("1g.5gb", 6)), with_instances(("7g.40gb", 0))
APPLIED = with_instances(("3g.20gb", 0), ("3g.20gb", 4))


def test_a_gpu_is_shown_in_mig_mode_with_instances_that_have_no_uuid_yet():
    after, outcome = preview(IDLE)

    assert outcome is None
    assert (after.mig.on, after.mig.pending) == (True, True)
    to_come, existing = (
        published_devices(build_offer(Inventory((gpu,)), profile(), ApiFeatures(), {}))
        for gpu in (after, APPLIED)
    )
    assert [device["name"] for device in to_come] == [
        *("gpu-0-mig-3g20gb-9-4", "gpu-0-mig-3g20gb-9-0", "gpu-0-mon")
    ]
    for device in existing[:2]:
        assert device["attributes"].pop("uuid")["string"].startswith("MIG-")
    assert to_come[:2] == existing[:2]


def test_what_a_layout_created_gives_way_and_what_fits_stays():
    gpu = with_instances(
        ("1g.5gb", 6), ("3g.20gb", 0), unusable=(unusable(mig(), "1g.5gb", 4, gi=7),)
    )

    after, outcome = preview(gpu, state=created_by_layouts(gpu))

    assert outcome is None
    assert [listed.uuid for listed in after.mig.instances] == ["MIG-9-0", ""]
    assert after.mig.unusable == ()
    assert preview(SMALL, OFF, created_by_layouts(SMALL)) == (IDLE, None)


HELD = "claims hold it"
PENDING = LayoutOutcome("halves", LayoutState.PENDING, HELD)
NEVER = LayoutOutcome("thirds", LayoutState.FAILED, refusal(IDLE, THIRDS))
IN_THE_WAY = LayoutOutcome("halves", LayoutState.FAILED, refusal(WHOLE))


@pytest.mark.parametrize(
    ("gpu", "layout", "waits", "outcome"),
    [
        pytest.param(APPLIED, HALVES, "", DONE, id="it looks so already"),
        pytest.param(APPLIED, HALVES, HELD, DONE, id="it looks so already, and is held"),
        pytest.param(IDLE, HALVES, HELD, PENDING, id="it is held"),
        pytest.param(IDLE, THIRDS, "", NEVER, id="a layout that never fits"),
        pytest.param(IDLE, THIRDS, HELD, NEVER, id="nor once the GPU is free"),
        pytest.param(WHOLE, HALVES, "", IN_THE_WAY, id="unmanaged instances are in the way"),
        pytest.param(
            WHOLE,
            HALVES,
            HELD,
            replace(PENDING, reason=f"{HELD}; then: {IN_THE_WAY.reason}"),
            id="unmanaged instances are in the way later",
        ),
    ],
)
def test_a_gpu_that_is_not_changed_now_is_shown_as_it_is(gpu, layout, waits, outcome):
    assert preview(gpu, layout, waits=waits) == (gpu, outcome)


def test_what_was_created_for_claims_is_in_the_way_of_nothing_but_has_to_end():
    claimed = frozenset({(SMALL.uuid, SMALL.mig.instances[0].key)})

    assert preview(SMALL, claimed=claimed, waits=HELD) == (SMALL, PENDING)


@pytest.mark.parametrize(
    ("recorded", "counts"),
    [
        *(
            (LayoutOutcome("halves", state, "MIG mode cannot be turned on"), True)
            for state in (LayoutState.FAILED, LayoutState.PENDING)
        ),
        pytest.param(DONE, False, id="it was applied, and is gone"),
        pytest.param(replace(DONE, layout="thirds", state=LayoutState.FAILED), False, id="another"),
    ],
)
def test_the_outcome_of_a_layout_that_is_not_applied_counts(recorded, counts):
    after, outcome = preview(IDLE, state=MigState(outcomes={IDLE.uuid: recorded}))

    assert (after, outcome) == ((IDLE, recorded) if counts else preview(IDLE))


@pytest.mark.parametrize("board", boards())
def test_every_built_in_layout_fits_and_a_gpu_is_shown_as_it_looks_once_it_is_applied(board):
    gpu = mig_gpu(board)
    for built_in in built_in_layouts([gpu]).values():
        layout = desired_layout(built_in, gpu, 0)
        assert layout is not None
        success = LayoutOutcome(layout.layout, LayoutState.SUCCESS)

        after, outcome = preview(gpu, layout)

        assert (after, outcome) == ((after, None) if layout.on else (gpu, success))
        change = plan_layout_change(after, layout, ())
        assert isinstance(change, LayoutChange) and change.is_nothing
        assert preview(after, layout) == (after, success)
