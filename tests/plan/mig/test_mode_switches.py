"""Which boards are switched to MIG mode before anything is cut: idle ones that need a reset."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.model.gpus import GpuUuid, GuestRestriction, Inventory
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE, MigRules
from dra_driver.model.records import Holding
from dra_driver.plan.mig.dynamic import after_switch, gpus_to_switch
from dra_driver.plan.offer.devices import build_offer
from tests.builders import gpu, ref
from tests.plan.mig.boards import dynamic, mig_gpu, profile


def chosen(*gpus, profile=None, features=None, held=None):
    uuids = gpus_to_switch(
        Inventory(gpus), profile or dynamic(), features or ApiFeatures(), held or {}
    )
    assert all(uuid.startswith("GPU-") for uuid in uuids)
    return [gpu.minor for gpu in gpus if gpu.uuid in uuids]


def holding(gpu, **fields):
    return {gpu.uuid: (Holding(ref(), gpu.name, gpu=gpu.uuid, **fields),)}


def test_an_idle_board_that_needs_a_reset_is_switched():
    assert chosen(mig_gpu("a100-40"), mig_gpu("a30-24", 1)) == [0, 1]


@pytest.mark.parametrize(
    ("gpu", "more"),
    [
        pytest.param(mig_gpu("h100-80-sxm"), {}, id="it switches when a claim needs it"),
        pytest.param(gpu(0), {}, id="it cannot be cut"),
        pytest.param(mig_gpu(on=True, pending=True), {}, id="it is on"),
        pytest.param(
            mig_gpu(fixed=GuestRestriction.MODE), {}, id="a virtual machine cannot reset it"
        ),
        pytest.param(
            mig_gpu(fixed=GuestRestriction.MODE, pending=True), {}, id="it waits for a reboot"
        ),
        pytest.param(mig_gpu(fixed=GuestRestriction.ALL), {}, id="it is a vGPU"),
        pytest.param(mig_gpu(), {"profile": DEFAULT_PROFILE}, id="nobody wants it"),
        pytest.param(
            mig_gpu(),
            {"profile": profile(include=False, mig=MigRules(True))},
            id="it is left out",
        ),
        pytest.param(mig_gpu(), {"profile": dynamic("9g.*")}, id="it has no such profile"),
        pytest.param(
            mig_gpu(),
            {"features": ApiFeatures(counters=False)},
            id="the API server has no counters",
        ),
        pytest.param(
            mig_gpu(),
            {
                "profile": profile(mig=MigRules(True), replicas=2),
                "features": ApiFeatures(capacity=False),
            },
            id="its replicas are devices",
        ),
        pytest.param(mig_gpu(), {"held": holding(mig_gpu())}, id="a claim holds it"),
    ],
)
def test_any_other_board_is_left_as_it_is(gpu, more):
    assert chosen(gpu, **more) == []


def test_a_claim_that_only_looks_on_does_not_keep_a_board_from_being_switched():
    assert chosen(mig_gpu(), held=holding(mig_gpu(), admin=True)) == [0]


def test_a_claim_keeps_only_its_own_board_from_being_switched():
    assert chosen(mig_gpu(), mig_gpu(minor=1), held=holding(mig_gpu())) == [1]


def test_a_mode_that_is_pending_and_had_no_reset_yet_is_switched_like_any_other():
    pending = mig_gpu(pending=True)

    assert chosen(pending) == [0]
    assert chosen(pending, profile=DEFAULT_PROFILE) == []
    assert after_switch(Inventory((pending,)), dynamic(), ApiFeatures(), {}).gpus == (
        mig_gpu(on=True, pending=True),
    )


@pytest.mark.parametrize("fields", [{}, {"pending": True}])
def test_after_the_switch_such_a_board_is_offered_in_partitions(fields):
    node = Inventory((mig_gpu(**fields), mig_gpu("h100-80-sxm", 1), gpu(2), mig_gpu(minor=3)))
    everything: Any = (dynamic(), ApiFeatures(), holding(node.gpus[3]))

    after = after_switch(node, *everything)

    assert after.gpus[0] == mig_gpu(on=True, pending=True)
    assert after.gpus[1:] == node.gpus[1:]
    names = {str(device.name) for device in build_offer(after, *everything).devices}
    assert "gpu-0" not in names
    assert {"gpu-0-mig-7g40gb-0-0", "gpu-1", "gpu-2", "gpu-3"} <= names
    assert gpus_to_switch(after, *everything) == ()


def test_a_board_that_is_stuck_is_whole_also_after_the_switch_of_others():
    stuck, other = mig_gpu(), replace(mig_gpu(minor=1), uuid=GpuUuid("GPU-1"))

    after = after_switch(
        Inventory((stuck, other)), dynamic(), ApiFeatures(), {}, stuck={stuck.uuid}
    )

    assert after.gpus[0] == stuck
    offer = build_offer(after, dynamic(), ApiFeatures(), {})
    assert "gpu-0" in {str(device.name) for device in offer.devices}
    assert "gpu-1" not in {str(device.name) for device in offer.devices}
    (reason,) = (pending.reason for pending in offer.pending if pending.device == "gpu-0")
    assert "MIG mode is off" in reason
