"""A GPU is an MPS server's alone where nobody else has a claim on it, and only there."""

from dataclasses import replace

import pytest

from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Version
from dra_driver.model.offer import EXCLUSIVE, Offer
from dra_driver.model.profiles import MpsServerScope, SharingStrategy
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ComputeMode, ServeMpsNamespace, SetComputeMode
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.gpu_settings import restore_steps
from tests.builders import POOL, allocation, config, fraction, gpu, offer, ref
from tests.fakes.pods import container, pod_spec

MPS = config(sharing={"strategy": "MPS"})
TURNS = config(sharing={"strategy": "TimeSlicing"})
MPS_ONLY = offer(strategies=(SharingStrategy.MPS,), default_strategy=SharingStrategy.MPS)


def planned(
    *allocations,
    name="claim",
    others=(),
    configs=(MPS,),
    at=None,
    pods=(),
    namespace="default",
) -> ClaimRecord:
    claim = Claim(ref(name, namespace=namespace), allocations, configs)
    return plan_claim(claim, at or offer(4), others, POOL, pods).record


def alone(record: ClaimRecord) -> list[int]:
    """The GPUs that are its server's alone, by minor number."""
    exclusive = modes(record)
    assert set(exclusive.values()) <= {ComputeMode.EXCLUSIVE_PROCESS}
    return list(exclusive)


def undo_modes(record: ClaimRecord) -> list[ComputeMode]:
    steps = restore_steps(record, ())
    return [step.mode for step in steps if isinstance(step, SetComputeMode)]


def modes(record: ClaimRecord) -> dict[int, ComputeMode]:
    """What it sets, by minor number."""
    minors = {gpu(n).uuid: n for n in range(4)}
    steps = (step for step in record.steps if isinstance(step, SetComputeMode))
    return {minors[step.gpu]: step.mode for step in steps}


@pytest.mark.parametrize("shape", [EXCLUSIVE, None])
def test_a_whole_gpu_by_mps_is_its_servers_alone(shape):
    assert alone(planned(allocation(), at=offer(1, shape) if shape else None)) == [0]


def test_each_gpu_of_a_server_over_several_is_its_own():
    assert alone(planned(allocation("gpu-2"), allocation("gpu-1"))) == [1, 2]


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

    assert (
        len({step.namespace.gpus for step in record.steps if isinstance(step, ServeMpsNamespace)})
        == 2
    )
    assert alone(record) == [1]


def test_two_namespaces_of_one_server_have_the_gpu_alone():
    parts = (fraction("1Gi", request="a"), fraction("2Gi", request="b"))
    pod = pod_spec("p", container("one", ("claim", "a")), container("two", ("claim", "b")))

    assert alone(planned(*parts, at=MPS_ONLY, pods=(pod,))) == [0]


def test_another_server_opens_the_gpu_that_one_had_alone():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    both = (fraction("1Gi", "gpu-0"), fraction("1Gi", "gpu-1"))

    assert modes(planned(*both, others=(first,), at=MPS_ONLY)) == {
        0: ComputeMode.DEFAULT,
        1: ComputeMode.EXCLUSIVE_PROCESS,
    }


NEW = gpu(driver_version=Version(615, 71, 9))


@pytest.mark.parametrize(("driver", "opens"), [(gpu(), True), (NEW, False)])
def test_another_namespace_with_a_server_of_its_own_opens_the_gpu(driver, opens):
    at = Offer(tuple(replace(device, gpu=driver) for device in MPS_ONLY.devices))
    first = planned(fraction(), name="first", at=at)

    second = planned(fraction(), others=(first,), at=at, namespace="other")

    mode = ComputeMode.DEFAULT if opens else ComputeMode.EXCLUSIVE_PROCESS
    assert modes(second) == {0: mode}
    assert modes(planned(fraction(), others=(first,), at=at)) == {0: ComputeMode.EXCLUSIVE_PROCESS}
    assert modes(planned(fraction(), others=(first, second), at=at)) == {0: mode}


def test_where_the_profile_joins_namespaces_their_server_has_the_gpu_alone():
    at = Offer(
        tuple(
            replace(device, rules=replace(device.rules, mps_servers=MpsServerScope.SHARED))
            for device in MPS_ONLY.devices
        )
    )
    first = planned(fraction(), name="first", at=at)

    second = planned(fraction(), others=(first,), at=at, namespace="other")

    assert modes(first) == modes(second) == {0: ComputeMode.EXCLUSIVE_PROCESS}


def test_who_takes_turns_opens_it_too_and_who_looks_on_does_not():
    first = planned(fraction(), name="first", at=MPS_ONLY)

    assert modes(planned(fraction(), others=(first,), configs=())) == {0: ComputeMode.DEFAULT}
    assert modes(planned(allocation(admin=True), others=(first,), configs=())) == {}
    assert modes(planned(fraction(device="gpu-1"), others=(first,), configs=())) == {}


def test_a_gpu_that_was_opened_stays_open_as_long_as_who_opened_it_is_there():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    opener = planned(fraction(), name="opener", others=(first,), configs=())

    assert modes(planned(fraction(), others=(first, opener), at=MPS_ONLY)) == {}
    assert restore_steps(first, (opener,)) == ()
    assert undo_modes(opener) == [ComputeMode.DEFAULT]


def test_what_was_found_before_the_first_comes_back_after_the_one_that_opened_it():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    (step,) = (step for step in first.steps if isinstance(step, SetComputeMode))
    completed_step = replace(step, before=ComputeMode.PROHIBITED)
    first = replace(first, steps=(completed_step,))

    opener = planned(fraction(), name="opener", others=(first,), configs=())

    assert undo_modes(opener) == [ComputeMode.PROHIBITED]


def test_a_later_claim_of_the_same_server_is_served_whatever_the_profile_says_now():
    first = planned(fraction(), name="first", at=MPS_ONLY)

    assert modes(planned(fraction(), others=(first,))) == {}


def test_a_claim_with_the_server_that_is_alone_and_another_one_opens_the_gpu():
    first = planned(fraction(), name="first", at=MPS_ONLY)
    parts = (
        fraction("1Gi", "gpu-0", "a"),
        fraction("1Gi", "gpu-1", "b"),
        fraction("2Gi", "gpu-0", "b"),
    )
    pod = pod_spec("p", container("one", ("claim", "a")), container("two", ("claim", "b")))

    assert modes(planned(*parts, others=(first,), at=MPS_ONLY, pods=(pod,)))[0] is (
        ComputeMode.DEFAULT
    )
