"""A pod may use what its claims hold of a GPU together, and nothing is left of that afterwards."""

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, Holding
from dra_driver.model.steps import PodMemoryLimit, PodMemoryShare, SetMemoryLimits
from dra_driver.plan.memory.pod_limits import (
    memory_limit_steps,
    pod_memory_shares,
    restored_memory_limit_steps,
)
from tests.builders import ref

GUARD = GuardRules(GuardPolicy.KILL)
GPUS = [GpuUuid("GPU-0"), GpuUuid("GPU-1")]


def held(size, gpu=0, strict=False, **fields):
    """A part of a GPU; all of it, where *size* is None."""
    limit = None if size is None else ClaimMemoryLimit(size, GUARD, strict)
    return Holding(ref(), DeviceName(f"gpu-{gpu}"), gpu=GPUS[gpu], limit=limit, **fields)


def record(name, *holdings, pods="a"):
    users = tuple(Pod(f"pod-{pod}", PodUid(pod)) for pod in pods)
    return ClaimRecord(ref(name), tuple(holdings), pods=users)


def limits(gpu=0, strict=False, **pods):
    pod_limits = tuple(PodMemoryLimit(PodUid(pod), size) for pod, size in sorted(pods.items()))
    return SetMemoryLimits(GPUS[gpu], pod_limits, strict)


def test_a_pod_is_limited_to_what_its_claim_holds():
    first = record("one", held(10), pods="ab")
    assert memory_limit_steps(first, ()) == (limits(a=10, b=10),)
    assert restored_memory_limit_steps(first, ()) == (limits(a=None, b=None),)


def test_what_a_pod_holds_of_a_gpu_is_one_sum():
    first = record("one", held(10), held(5), held(7, gpu=1))
    second = record("two", held(1), pods="ac")
    elsewhere = record("elsewhere", held(100), pods="d")
    assert memory_limit_steps(first, (second, elsewhere)) == (limits(a=16), limits(gpu=1, a=7))
    assert restored_memory_limit_steps(first, (second, elsewhere)) == (
        limits(a=1),
        limits(gpu=1, a=None),
    )


def test_a_claim_is_not_counted_twice():
    first = record("one", held(10))
    assert memory_limit_steps(first, (first,)) == (limits(a=10),)
    assert restored_memory_limit_steps(first, (first,)) == (limits(a=None),)


def test_a_whole_gpu_has_no_limit_and_takes_away_one():
    whole, part = record("whole", held(None)), record("part", held(10))
    assert memory_limit_steps(whole, ()) == restored_memory_limit_steps(whole, ()) == ()
    assert memory_limit_steps(whole, (part,)) == (limits(a=None),)
    assert memory_limit_steps(part, (whole,)) == ()
    assert restored_memory_limit_steps(whole, (part,)) == (limits(a=10),)


def test_a_claim_that_looks_on_gives_no_limit_and_takes_none_away():
    monitor, part = record("monitor", held(None, admin=True)), record("part", held(10))
    assert (
        memory_limit_steps(monitor, (part,)) == restored_memory_limit_steps(monitor, (part,)) == ()
    )
    assert memory_limit_steps(part, (monitor,)) == (limits(a=10),)
    assert pod_memory_shares((monitor,)) == ()


def test_a_step_is_strict_as_its_own_claim_is_and_its_undoing_never():
    first, second = record("one", held(10, strict=True)), record("two", held(5))
    assert memory_limit_steps(first, (second,)) == (limits(strict=True, a=15),)
    assert memory_limit_steps(second, (first,)) == (limits(a=15),)
    assert restored_memory_limit_steps(first, (second,)) == (limits(a=5),)


def test_shares_say_which_claim_holds_what():
    first, second = record("one", held(10, strict=True), held(1), pods="ab"), record("two", held(5))
    c1, c2 = ClaimUid("uid-one"), ClaimUid("uid-two")
    a = PodMemoryShare(PodUid("a"), GPUS[0], ((c1, 11), (c2, 5)), strict=True)
    b = PodMemoryShare(PodUid("b"), GPUS[0], ((c1, 11),), strict=True)
    assert pod_memory_shares((second, first)) == (a, b)
    assert (a.memory_bytes, a.of({c1}), a.of({c2, ClaimUid("x")}), a.of(())) == (16, 11, 5, 0)


def test_a_claim_without_a_limit_lifts_that_of_who_uses_it():
    share = PodMemoryShare(PodUid("a"), GPUS[0], ((ClaimUid("p"), 10), (ClaimUid("w"), None)))
    assert share.memory_bytes is None
    assert share.of({ClaimUid("p")}) == 10
    assert share.of({ClaimUid("w")}) is None


sizes = st.one_of(st.none(), st.integers(1, 100))
holdings = st.builds(held, sizes, st.integers(0, 1), admin=st.booleans())
claims = st.lists(
    st.tuples(st.lists(holdings, min_size=1, max_size=3), st.sets(st.sampled_from("abc"))),
    min_size=1,
    max_size=4,
)


class Driver:
    """What the driver keeps, as steps change it."""

    def __init__(self):
        self.limits = {}

    def do(self, steps):
        for step in steps:
            for limit in step.pods:
                self.limits.pop((step.gpu, limit.pod), None)
                if limit.memory_bytes is not None:
                    self.limits[step.gpu, limit.pod] = limit.memory_bytes


def expected(records):
    """By hand: the sum of the parts, and nothing where one of them is all."""
    parts = {}
    for claim_record in records:
        for pod in claim_record.pods:
            for holding in claim_record.holdings:
                if not holding.admin:
                    parts.setdefault((holding.gpu, pod.uid), []).append(holding.limit)
    return {
        key: sum(limit.memory_bytes for limit in limits)
        for key, limits in parts.items()
        if None not in limits
    }


@given(claims, st.data())
def test_after_any_sequence_each_pod_has_the_sum_of_what_it_holds_and_at_the_end_none(drawn, data):
    records = [
        record(f"claim-{at}", *parts, pods=sorted(pods)) for at, (parts, pods) in enumerate(drawn)
    ]
    driver, records_held = Driver(), {}
    for name in data.draw(st.lists(st.sampled_from(range(len(records))), max_size=12)):
        # Prepared, prepared again, unprepared in any order.
        claim_record = records[name]
        others = [record for at, record in records_held.items() if at != name]
        if name in records_held and data.draw(st.booleans()):
            driver.do(restored_memory_limit_steps(claim_record, others))
            # a crash came before it was forgotten
            driver.do(restored_memory_limit_steps(claim_record, others))
            del records_held[name]
        else:
            driver.do(memory_limit_steps(claim_record, others))
            records_held[name] = claim_record
        assert driver.limits == expected(records_held.values())
        shares = {
            (share.gpu, share.pod): share.memory_bytes
            for share in pod_memory_shares(records_held.values())
        }
        assert {key: size for key, size in shares.items() if size is not None} == driver.limits
    for name in list(records_held):
        claim_record = records_held.pop(name)
        driver.do(restored_memory_limit_steps(claim_record, records_held.values()))
    assert driver.limits == {}
