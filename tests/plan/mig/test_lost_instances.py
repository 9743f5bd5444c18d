"""Instances of prepared claims that are lost, told from those of which nothing is known."""

from dataclasses import replace

import pytest

from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import DeviceName, GpuUuid, MigInfo
from dra_driver.model.offer import Device, Offer
from dra_driver.model.steps import RemovePartition
from dra_driver.plan.mig.claims import (
    computed_partitions,
    lost_instance_message,
    lost_instances,
    partitions_created_for,
    released_partitions,
    with_lost_instances,
)
from dra_driver.plan.prepare.claim import plan_claim, undo_steps
from tests.builders import POOL, allocation, claim, config, gpu, ref
from tests.fakes.mig import H100, ONE, instance, mig_gpu, mig_offer, partition

FIRST, SECOND = DeviceName("gpu-0-mig-1g10gb-19-0"), DeviceName("gpu-0-mig-1g10gb-19-1")
MINE, OTHER = instance(ONE, 0), instance(ONE, 1, gi=2)
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})


def completed(allocated, offer=None, *instances):
    """The record of a claim that was prepared and has these instances."""
    plan = plan_claim(allocated, offer or mig_offer(), (), POOL)
    uuids = (grant.device.uuid for grant in plan.grants)
    record = plan.settled(dict(zip(uuids, instances, strict=True)) if instances else {}).record
    return replace(record, prepared=(), spec="{}")


def board(*instances):
    return replace(mig_gpu(), mig=MigInfo(True, True, True, H100, instances))


RECORD = completed(claim(FIRST), None, MINE)
RECORD_OF_TWO = completed(claim(FIRST, SECOND), None, MINE, OTHER)


@pytest.mark.parametrize(
    ("gpus", "is_lost"),
    [
        pytest.param([board(MINE)], False, id="it exists"),
        pytest.param([board()], True, id="it does not exist"),
        pytest.param([board(OTHER)], True, id="another one exists"),
        pytest.param([board(replace(MINE, uuid=GpuUuid("MIG-new")))], True, id="in its place"),
        pytest.param([], False, id="the GPU is not seen"),
        pytest.param([mig_gpu(1)], False, id="another GPU is seen"),
        pytest.param([gpu(0)], False, id="the GPU does not tell"),
    ],
)
def test_an_instance_is_lost_where_its_gpu_says_that_it_does_not_have_it(gpus, is_lost):
    assert lost_instances(RECORD, gpus) == (RECORD.holdings if is_lost else ())


def test_a_lost_instance_is_held_on_and_not_removed_any_more():
    first, second = RECORD_OF_TWO.holdings

    after = with_lost_instances(RECORD_OF_TWO, [first])

    assert [step.key for step in partitions_created_for([after])] == [second.partition]
    assert after.holdings == (replace(first, created_for_claims=False), second)
    assert after.created_partitions == {(second.gpu, second.partition)}
    assert [step.key for step in undo_steps(after, ()) if isinstance(step, RemovePartition)] == [
        second.partition
    ]
    assert with_lost_instances(RECORD_OF_TWO, ()) == RECORD_OF_TWO
    assert lost_instances(after, [board(OTHER)]) == after.holdings[:1]


RESET = mig_offer(mig_gpu(on=True, switches=False))
EXISTING = Offer((Device(board(MINE), partition=partition(ONE), instance=MINE, offered=("x",)),))


@pytest.mark.parametrize(
    ("record", "is_known"),
    [
        pytest.param(with_lost_instances(RECORD, RECORD.holdings), True, id="the only one"),
        pytest.param(RECORD, False, id="it was not lost"),
        pytest.param(
            replace(with_lost_instances(RECORD, RECORD.holdings), prepared=None),
            False,
            id="its claim is not prepared",
        ),
        *(
            pytest.param(
                with_lost_instances(RECORD_OF_TWO, RECORD_OF_TWO.holdings[:count]),
                False,
                id=f"{count} of two on one GPU",
            )
            for count in (1, 2)
        ),
        pytest.param(
            with_lost_instances(
                completed(claim(FIRST), RESET, MINE), completed(claim(FIRST), RESET, MINE).holdings
            ),
            False,
            id="a board that is not switched for claims",
        ),
        pytest.param(completed(claim(FIRST), EXISTING), False, id="it existed before the claim"),
    ],
)
def test_a_record_says_of_a_gpu_that_is_switched_for_claims_which_instance_was_lost(
    record, is_known
):
    assert released_partitions(record) == (record.holdings if is_known else ())


@pytest.mark.parametrize(
    ("record", "computes"),
    [
        pytest.param(RECORD, True, id="an instance that was created for it"),
        pytest.param(completed(claim(FIRST), EXISTING), True, id="an instance that existed"),
        pytest.param(replace(RECORD, prepared=None), False, id="it is still being prepared"),
        pytest.param(
            completed(Claim(ref(), (allocation(FIRST, admin=True),))), False, id="admin access"
        ),
        pytest.param(completed(claim("gpu-0")), False, id="a whole GPU"),
    ],
)
def test_a_prepared_claim_computes_on_its_instances(record, computes):
    assert computed_partitions(record) == (record.holdings if computes else ())


@pytest.mark.parametrize(("configs", "served"), [((), False), ((MPS,), True)])
def test_a_pod_is_told_which_instance_it_lost_and_what_to_do(configs, served):
    record = completed(claim(FIRST, configs=configs), None, MINE)

    message = lost_instance_message(record, *lost_instances(record, [board()]))

    assert f"{FIRST} ({MINE.uuid}) is not there any more" in message
    assert "delete the pod" in message
    assert ("its MPS server is ended" in message) == served
