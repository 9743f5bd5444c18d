"""Boards that are switched to MIG mode before they are partitioned: idle, with a reset."""

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
    """The minor numbers of the GPUs that are switched."""
    uuids = gpus_to_switch(
        Inventory(gpus), profile or dynamic(), features or ApiFeatures(), held or {}
    )
    return [gpu.minor for gpu in gpus if gpu.uuid in uuids]


def holding(gpu, **fields):
    return {gpu.uuid: (Holding(ref(), gpu.name, gpu=gpu.uuid, **fields),)}


A100, PENDING = mig_gpu(), mig_gpu(pending=True)
REPLICAS = profile(mig=MigRules(True), replicas=2)


@pytest.mark.parametrize(
    ("gpus", "fields", "expected"),
    [
        pytest.param((A100, mig_gpu("a30-24", 1)), {}, [0, 1], id="idle boards"),
        pytest.param((PENDING,), {}, [0], id="the mode is pending, without a reset"),
        pytest.param((A100,), {"held": holding(A100, admin=True)}, [0], id="admin access"),
        pytest.param(
            (A100, mig_gpu(minor=1)), {"held": holding(A100)}, [1], id="a claim holds the other"
        ),
        pytest.param((A100,), {"held": holding(replace(A100, minor=7))}, [], id="held by its UUID"),
        pytest.param((PENDING,), {"profile": DEFAULT_PROFILE}, [], id="pending, for nobody"),
        pytest.param((mig_gpu("h100-80-sxm"),), {}, [], id="it switches when a claim needs it"),
        pytest.param((gpu(0),), {}, [], id="it cannot be partitioned"),
        pytest.param((mig_gpu(on=True),), {}, [], id="it is on"),
        *(
            pytest.param((mig_gpu(**fields),), {}, [], id=id_)
            for fields, id_ in (
                ({"fixed": GuestRestriction.MODE}, "a virtual machine cannot reset it"),
                ({"fixed": GuestRestriction.MODE, "pending": True}, "it waits for a reboot"),
                ({"fixed": GuestRestriction.ALL}, "it is a vGPU"),
            )
        ),
        *(
            pytest.param((A100,), fields, [], id=id_)
            for fields, id_ in (
                ({"profile": DEFAULT_PROFILE}, "no profile says so"),
                ({"profile": profile(include=False, mig=MigRules(True))}, "it is left out"),
                ({"profile": dynamic("9g.*")}, "it has no such profile"),
                ({"features": ApiFeatures(counters=False)}, "the API server has no counters"),
                (
                    {"profile": REPLICAS, "features": ApiFeatures(capacity=False)},
                    "its replicas are devices",
                ),
            )
        ),
    ],
)
def test_idle_boards_that_need_a_reset_are_switched_and_no_others(gpus, fields, expected):
    assert chosen(*gpus, **fields) == expected


@pytest.mark.parametrize("board", [A100, PENDING])
def test_after_the_switch_such_a_board_is_offered_in_partitions(board):
    node = Inventory((board, mig_gpu("h100-80-sxm", 1), gpu(2), mig_gpu(minor=3)))
    arguments: Any = (dynamic(), ApiFeatures(), holding(node.gpus[3]))

    after = after_switch(node, *arguments)

    assert after.gpus == (mig_gpu(on=True), *node.gpus[1:])
    names = {str(device.name) for device in build_offer(after, *arguments).devices}
    assert "gpu-0" not in names
    assert {"gpu-0-mig-7g40gb-0-0", "gpu-1", "gpu-2", "gpu-3"} <= names
    assert gpus_to_switch(after, *arguments) == ()


def test_a_board_that_is_stuck_is_whole_also_after_the_switch_of_others():
    other = replace(mig_gpu(minor=1), uuid=GpuUuid("GPU-1"))

    after = after_switch(Inventory((A100, other)), dynamic(), ApiFeatures(), {}, stuck={A100.uuid})

    assert after.gpus[0] == A100
    offer = build_offer(after, dynamic(), ApiFeatures(), {})
    names = {str(device.name) for device in offer.devices}
    assert ("gpu-0" in names, "gpu-1" in names) == (True, False)
    (reason,) = (pending.reason for pending in offer.pending if pending.device == "gpu-0")
    assert "MIG mode is off" in reason
