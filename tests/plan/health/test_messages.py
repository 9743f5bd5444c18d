"""What people are told of sick GPUs."""

import doctest

from dra_driver.model.gpus import PartitionKey
from dra_driver.model.health import Fault, GpuEvent, Problem
from dra_driver.plan.health import messages, state
from dra_driver.plan.health.problems import PROBLEMS, RECOVERY_ACTIONS, XIDS
from tests.builders import gpu_uuid

NOON = 1_764_000_000.0  # 2025-11-24T16:00:00Z


def fault(problem: Problem = Problem.XID, value: str = "", **fields) -> Fault:
    return Fault(gpu_uuid(), problem, value, **{"since": NOON, **fields})


def test_the_examples_are_true():
    assert doctest.testmod(messages).failed == doctest.testmod(state).failed == 0


def test_a_fault_is_one_sentence():
    assert messages.describe_fault(fault(value="79", count=3)) == (
        "Xid 79: the GPU has fallen off the bus, since 2025-11-24T16:00:00Z, 3 times; "
        "reboot the node; if it happens again, have the GPU examined"
    )


def test_a_fault_of_a_partition_says_which():
    of = fault(Problem.UNCORRECTABLE_ECC, partition=PartitionKey(19, 2, 1, 1))

    assert ", in the partition of profile 19 at 2, since" in messages.describe_fault(of)


def test_a_recovery_action_says_what_the_driver_asks_for():
    reset = fault(Problem.RECOVERY_ACTION, "GPU_RESET")
    unknown = fault(Problem.RECOVERY_ACTION, "31")

    assert "asks for a recovery action: GPU_RESET" in messages.describe_fault(reset)
    assert "dra-driver health release" in messages.describe_fault(reset)
    assert messages.describe_fault(unknown).endswith("; do what it asks for")


def test_the_latest_fault_is_told_first_and_what_to_do_for_several_once():
    ecc = fault(Problem.UNCORRECTABLE_ECC)
    text = messages.describe_faults([ecc, fault(value="48", since=NOON + 1)])

    assert text.startswith("Xid 48: ")
    assert text.count("reset the GPU") == 1


def test_many_faults_are_told_as_far_as_there_is_room():
    text = messages.describe_faults(fault(value=str(number)) for number in XIDS)

    assert len(text) == len(text.encode()) == messages.LONGEST_MESSAGE
    assert text.endswith(" ...")


def test_an_event_names_the_process_that_caused_it():
    event = GpuEvent(gpu_uuid(), Problem.XID, "31", gi=3, count=2, pid=1234)

    assert messages.describe_event(event) == (
        "Xid 31: a page fault in memory of the GPU in GPU instance 3 by process 1234, 2 times; "
        "look at the program that caused it"
    )


def test_an_event_of_a_whole_gpu_is_as_short():
    event = GpuEvent(gpu_uuid(), Problem.CORRECTABLE_ECC)

    assert messages.describe_event(event) == (
        "ECC corrects errors of the GPU's memory; ignore it, as long as they are few"
    )


def test_everything_can_be_told_in_plain_words():
    words = [
        *(text for entry in PROBLEMS.values() for text in (entry.meaning, entry.action)),
        *(text for entry in XIDS.values() for text in (entry.meaning, entry.action)),
        *RECOVERY_ACTIONS.values(),
    ]
    for text in words:
        assert text.isascii()
        assert text == text.strip(" .;")
        assert "  " not in text
