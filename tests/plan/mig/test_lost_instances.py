"""Instances of prepared claims that somebody removed, told from all that is only not known."""

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

FIRST = DeviceName("gpu-0-mig-1g10gb-19-0")
MINE = instance(ONE, 0)
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})


def completed(plan, *instances):
    uuids = (grant.device.uuid for grant in plan.grants)
    record = plan.settled(dict(zip(uuids, instances, strict=True))).record
    return replace(record, prepared=(), spec="{}")


def prepared(*configs):
    plan = plan_claim(claim(FIRST, configs=configs), mig_offer(), (), POOL)
    return completed(plan, MINE)


def prepared_both():
    second = DeviceName("gpu-0-mig-1g10gb-19-1")
    plan = plan_claim(claim(FIRST, second), mig_offer(), (), POOL)
    return completed(plan, MINE, instance(ONE, 1, gi=2))


def board(*there):
    return replace(mig_gpu(), mig=MigInfo(True, True, True, H100, there))


def test_an_instance_that_is_there_is_not_lost():
    assert lost_instances(prepared(), [board(MINE)]) == ()


@pytest.mark.parametrize(
    "there", [(), (instance(ONE, 1),), (replace(MINE, uuid=GpuUuid("MIG-of-another")),)]
)
def test_one_that_is_not_there_is_lost_also_with_another_in_its_place(there):
    (holding,) = lost_instances(prepared(), [board(*there)])

    assert holding.device == FIRST


def test_what_is_given_up_is_held_and_not_removed_any_more():
    record = prepared_both()
    first, second = record.holdings

    after = with_lost_instances(record, [first])

    assert [created.key for created in partitions_created_for([after])] == [second.partition]
    assert after.holdings == (replace(first, created_for_claims=False), second)
    assert after.created_partitions == {(second.gpu, second.partition)}
    assert [step.key for step in undo_steps(after, ()) if isinstance(step, RemovePartition)] == [
        second.partition
    ]
    assert with_lost_instances(record, ()) == record
    assert (
        lost_instances(after, [board(*(holding.instance for holding in after.holdings[1:]))])
        == after.holdings[:1]
    )


def test_of_a_gpu_that_is_switched_for_claims_it_is_known_what_was_given_up():
    record = prepared()
    after = with_lost_instances(record, record.holdings)

    assert released_partitions(record) == ()
    assert released_partitions(after) == after.holdings
    assert released_partitions(replace(after, prepared=None)) == ()


def test_of_several_on_one_gpu_it_is_not_known_which_was_given_up():
    record = prepared_both()

    assert released_partitions(with_lost_instances(record, record.holdings[:1])) == ()
    assert released_partitions(with_lost_instances(record, record.holdings)) == ()


def test_of_a_board_that_claims_do_not_switch_nothing_tells_it():
    plan = plan_claim(claim(FIRST), mig_offer(mig_gpu(on=True, switches=False)), (), POOL)
    record = completed(plan, MINE)

    assert released_partitions(with_lost_instances(record, record.holdings)) == ()


def test_an_instance_that_was_there_before_was_not_given_up():
    device = Device(board(MINE), partition=partition(ONE), instance=MINE, offered=("1g.10gb",))
    plan = plan_claim(claim(FIRST), Offer((device,)), (), POOL)
    record = replace(plan.record, prepared=(), spec="{}")

    (holding,) = computed_partitions(record)
    assert (holding.instance, holding.created_for_claims) == (MINE, False)
    assert released_partitions(record) == ()


@pytest.mark.parametrize("gpus", [(), (mig_gpu(1),), (gpu(0),)])
def test_of_a_gpu_that_does_not_say_nothing_is_known(gpus):
    assert lost_instances(prepared(), gpus) == ()


def test_a_claim_that_is_still_being_prepared_has_lost_nothing():
    assert computed_partitions(replace(prepared(), prepared=None)) == ()


def test_who_looks_on_and_who_has_a_whole_gpu_computes_on_no_partition():
    looking_on = Claim(ref(), (allocation(FIRST, admin=True),))
    plans = [
        plan_claim(looking_on, mig_offer(), (), POOL),
        plan_claim(claim("gpu-0"), mig_offer(), (), POOL),
    ]

    records = [replace(plan.record, prepared=(), spec="{}") for plan in plans]
    assert [computed_partitions(record) for record in records] == [(), ()]


@pytest.mark.parametrize(("configs", "served"), [((), False), ((MPS,), True)])
def test_the_pod_is_told_which_instance_it_lost_and_what_to_do(configs, served):
    record = prepared(*configs)
    (holding,) = lost_instances(record, [board()])

    message = lost_instance_message(record, holding)

    assert f"{FIRST} ({MINE.uuid}) is not there any more" in message
    assert "delete the pod" in message
    assert ("its MPS server is ended" in message) == served
