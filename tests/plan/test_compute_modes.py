"""A GPU is an MPS server's alone where nobody else has a claim on it, and only there."""

import pytest

from dra_driver.errors import DeviceHeld
from dra_driver.kubeletplugin.claims import Claim
from dra_driver.model.holdings import Record
from dra_driver.model.offer import EXCLUSIVE
from dra_driver.model.profiles import Strategy
from dra_driver.model.steps import ComputeMode, ServeMps, SetComputeMode
from dra_driver.plan.prepare import plan_claim
from tests.fakes.pods import container, pod_spec
from tests.fakes.values import POOL, allocation, config, fraction, gpu, offer, ref

MPS = config(sharing={"strategy": "MPS"})
TURNS = config(sharing={"strategy": "TimeSlicing"})
MPS_ONLY = offer(strategies=(Strategy.MPS,), default_strategy=Strategy.MPS)


def planned(*allocations, name="claim", others=(), configs=(MPS,), at=None, pods=()) -> Record:
    claim = Claim(ref(name), allocations, configs)
    return plan_claim(claim, at or offer(4), others, POOL, pods).record


def alone(record: Record) -> list[int]:
    """The GPUs that are its server's alone, by minor number."""
    steps = [step for step in record.steps if isinstance(step, SetComputeMode)]
    assert all(step.mode is ComputeMode.EXCLUSIVE_PROCESS for step in steps)
    minors = {gpu(n).uuid: n for n in range(4)}
    return [minors[step.gpu] for step in steps]


@pytest.mark.parametrize("shape", [EXCLUSIVE, None])
def test_a_whole_gpu_by_mps_is_its_servers_alone(shape):
    assert alone(planned(allocation(), at=offer(1, shape) if shape else None)) == [0]


def test_each_gpu_of_a_server_over_several_is_its_own():
    assert alone(planned(allocation("gpu-2"), allocation("gpu-1"))) == [1, 2]


def test_the_mode_is_set_before_the_server_is_there():
    kinds = [type(step) for step in planned(allocation()).steps]

    assert kinds.index(SetComputeMode) < kinds.index(ServeMps)


def test_a_whole_gpu_that_takes_turns_and_a_part_by_mps_change_no_mode():
    assert alone(planned(allocation(), configs=())) == []
    assert alone(planned(allocation(), configs=(TURNS,))) == []
    assert alone(planned(fraction())) == []


def test_of_a_server_over_a_whole_gpu_and_a_part_the_whole_one_is_its_own():
    assert alone(planned(allocation("gpu-0"), fraction("1Gi", "gpu-1"))) == [0]


def test_parts_are_the_servers_alone_where_the_profile_allows_mps_alone():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    second = planned(fraction(), name="second", at=MPS_ONLY, others=(first,))

    assert alone(first) == alone(second) == [0]


def test_who_only_looks_on_is_not_in_the_way():
    monitor = planned(allocation(admin=True), name="monitor")

    assert alone(planned(allocation(), others=(monitor,))) == [0]
    assert alone(planned(fraction(), others=(monitor,), at=MPS_ONLY)) == [0]


def test_a_claim_from_before_the_profile_allowed_mps_alone_is_not_barred():
    for before in (planned(fraction(), name="b"), planned(fraction(), name="b", configs=())):
        assert alone(planned(fraction(), others=(before,), at=MPS_ONLY)) == []


def test_two_servers_of_one_claim_do_not_bar_each_other():
    """Container one has gpu-0 and gpu-1, the other a second part of gpu-0."""
    parts = (
        fraction("1Gi", "gpu-0", "a"),
        fraction("1Gi", "gpu-1", "a"),
        fraction("2Gi", "gpu-0", "b"),
    )
    pod = pod_spec("p", container("one", ("claim", "a")), container("two", ("claim", "b")))

    record = planned(*parts, at=MPS_ONLY, pods=(pod,))

    assert len({step.space.gpus for step in record.steps if isinstance(step, ServeMps)}) == 2
    assert alone(record) == [1]


def test_two_spaces_of_one_server_have_the_gpu_alone():
    parts = (fraction("1Gi", request="a"), fraction("2Gi", request="b"))
    pod = pod_spec("p", container("one", ("claim", "a")), container("two", ("claim", "b")))

    assert alone(planned(*parts, at=MPS_ONLY, pods=(pod,))) == [0]


def test_another_server_is_refused_where_one_is_alone_and_says_whose_it_is():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    both = (fraction("1Gi", "gpu-0"), fraction("1Gi", "gpu-1"))

    with pytest.raises(DeviceHeld) as refused:
        planned(*both, others=(first,), at=MPS_ONLY)

    assert (
        "gpu-0 is in compute mode EXCLUSIVE_PROCESS for the MPS server of claim default/first "
        "(UID uid-first), which bars a second MPS server; it is served once"
    ) in str(refused.value)
    assert "gpu-1 is in compute mode" not in str(refused.value)


def test_who_takes_turns_is_refused_while_a_server_is_alone_and_who_looks_on_is_not():
    first = planned(fraction(), name="first", at=MPS_ONLY)

    with pytest.raises(DeviceHeld, match="which bars a process that takes turns"):
        planned(fraction(), others=(first,), configs=())
    assert planned(allocation(admin=True), others=(first,), configs=())
    assert planned(fraction(device="gpu-1"), others=(first,), configs=())


def test_a_later_claim_of_the_same_server_is_served_whatever_the_profile_says_now():
    first = planned(fraction(), name="first", at=MPS_ONLY)

    assert alone(planned(fraction(), others=(first,))) == []


def test_a_claim_with_the_server_that_is_alone_and_another_one_is_refused():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    parts = (
        fraction("1Gi", "gpu-0", "a"),
        fraction("1Gi", "gpu-1", "b"),
        fraction("2Gi", "gpu-0", "b"),
    )
    pod = pod_spec("p", container("one", ("claim", "a")), container("two", ("claim", "b")))

    with pytest.raises(DeviceHeld, match="which bars a second MPS server"):
        planned(*parts, others=(first,), at=MPS_ONLY, pods=(pod,))
