"""The memory guard warns and ends exactly when it should, and nobody else."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s.claims import PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.plan.memory.guard import (
    KILL_AFTER_SECONDS,
    LONGEST_GAP_SECONDS,
    REPEAT_WARNING_SECONDS,
    TOLERANCE_BYTES,
    GuardState,
    KillProcess,
    LimitExceeded,
    TerminateProcess,
    WarnOverLimit,
    claims_over_limit,
    guard_actions,
)
from dra_driver.plan.memory.usage import (
    ClaimMemoryUsage,
    GpuMemorySample,
    MemoryShare,
    ProcessUsage,
    claim_usages,
)
from tests.builders import ref

GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
A, B, C, D = ref("a"), ref("b"), ref("c"), ref("d")
POD = PodUid("pod")
GRACE = 10.0
GIB = 1 << 30


def gib(size):
    return None if size is None else size * GIB


def share(claim, memory=10, policy="Kill", grace=GRACE):
    """Of so many GiB."""
    return MemoryShare(claim, frozenset({POD}), gib(memory), GuardRules(GuardPolicy(policy), grace))


def process(pid, started=1):
    return ContainerProcess(pid, started, POD, f"container-of-{pid}")


def use(pid, memory, *claims, started=1):
    """Of so many GiB."""
    return ProcessUsage(
        process(pid, started), gib(memory), frozenset(claim.uid for claim in claims or (A,))
    )


def look(*uses, shares=None, gpu=GPU):
    return GpuMemorySample(gpu, tuple(shares or [share(A)]), uses)


class Told:
    """Looks one after another; what is done about each."""

    def __init__(self):
        self.excursions: GuardState = {}
        self.now = 1000.0

    def __call__(self, *looks, after=1.0):
        self.now += after
        self.excursions, actions = guard_actions(looks, self.excursions, self.now)
        return [brief(action) for action in actions]


def brief(action):
    names = " ".join(claim.name for claim in action.group.claims)
    match action:
        case LimitExceeded() | WarnOverLimit():
            return f"{type(action).__name__} {names}"
        case TerminateProcess(_, usage) | KillProcess(_, usage):
            return f"{type(action).__name__} {usage.process.pid}"


@pytest.fixture
def guard():
    return Told()


def test_a_claim_within_its_share_is_left_alone(guard):
    assert guard(look(use(1, 6), use(2, 4))) == []


def test_a_claim_above_its_share_is_warned_of_once(guard):
    above = look(use(1, 11))

    assert guard(above) == ["LimitExceeded a", "WarnOverLimit a"]
    assert guard(above) == []


def test_the_processes_of_a_claim_count_together(guard):
    assert guard(look(use(1, 6), use(2, 6))) == ["LimitExceeded a", "WarnOverLimit a"]


def test_after_the_grace_period_the_largest_process_is_asked_to_end(guard):
    above = look(use(1, 3), use(2, 9))
    guard(above)

    assert guard(above, after=GRACE - 0.5) == []
    assert guard(above, after=0.5) == ["TerminateProcess 2"]


def test_of_equal_processes_the_youngest_is_ended(guard):
    above = look(use(1, 6, started=7), use(2, 6, started=5))
    guard(above)

    assert guard(above, after=GRACE) == ["TerminateProcess 1"]


def test_a_process_that_does_not_end_is_killed_once(guard):
    above = look(use(1, 3), use(2, 9))
    guard(above)
    guard(above, after=GRACE)

    assert guard(above, after=KILL_AFTER_SECONDS - 0.1) == []
    assert guard(above, after=0.1) == ["KillProcess 2"]
    assert guard(above, after=KILL_AFTER_SECONDS) == []


def test_where_one_was_not_enough_the_next_follows_at_once(guard):
    guard(look(use(1, 12), use(2, 20)))
    guard(look(use(1, 12), use(2, 20)), after=GRACE)

    assert guard(look(use(1, 12))) == ["TerminateProcess 1"]


def test_a_process_that_frees_its_memory_when_asked_is_not_killed(guard):
    guard(look(use(1, 11)))
    guard(look(use(1, 11)), after=GRACE)
    for _ in range(4):
        assert guard(look(use(1, 9)), after=KILL_AFTER_SECONDS) == []

    assert guard(look(use(1, 11))) == ["LimitExceeded a"]
    assert guard(look(use(1, 11)), after=GRACE) == ["TerminateProcess 1"]


def test_a_process_that_frees_its_memory_for_a_moment_only_is_killed(guard):
    guard(look(use(1, 11)))
    guard(look(use(1, 11)), after=GRACE)
    assert guard(look(use(1, 9)), after=KILL_AFTER_SECONDS) == []

    assert guard(look(use(1, 11))) == ["KillProcess 1"]


def test_a_process_that_ended_does_not_have_the_next_one_forgiven(guard):
    guard(look(use(1, 11), use(2, 20)))
    guard(look(use(1, 11), use(2, 20)), after=GRACE)
    assert guard(look(use(1, 11))) == ["TerminateProcess 1"]
    assert guard(look(use(1, 9))) == []

    assert guard(look(use(1, 11)), after=KILL_AFTER_SECONDS) == ["KillProcess 1"]


def test_what_comes_after_a_process_that_ended_has_a_whole_grace_period(guard):
    guard(look(use(1, 11)))
    guard(look(use(1, 11)), after=GRACE)
    guard(look(use(2, 3)))

    assert guard(look(use(2, 3), use(3, 9))) == ["LimitExceeded a"]
    assert guard(look(use(2, 3), use(3, 9)), after=GRACE - 0.5) == []
    assert guard(look(use(2, 3), use(3, 9)), after=0.5) == ["TerminateProcess 3"]


def test_another_process_with_the_same_number_is_another_one(guard):
    guard(look(use(1, 11, started=1)))
    guard(look(use(1, 11, started=1)), after=GRACE)

    assert guard(look(use(1, 11, started=2)), after=KILL_AFTER_SECONDS) == ["TerminateProcess 1"]


def test_below_for_a_moment_and_the_grace_period_begins_anew(guard):
    guard(look(use(1, 11)))
    guard(look(use(1, 9)), after=GRACE / 2)

    assert guard(look(use(1, 11))) == ["LimitExceeded a"]
    assert guard(look(use(1, 11)), after=GRACE - 0.5) == []
    assert guard(look(use(1, 11)), after=0.5) == ["TerminateProcess 1"]


def test_below_in_every_fifth_look_does_not_save_a_process(guard):
    briefs = []
    for number in range(20):
        briefs += guard(look(use(1, 11 if number % 5 else 9)), after=2)

    assert briefs == ["LimitExceeded a", "WarnOverLimit a", "TerminateProcess 1", "KillProcess 1"]


def test_above_in_every_fifth_look_ends_nobody(guard):
    briefs = []
    for number in range(200):
        briefs += guard(look(use(1, 9 if number % 5 else 11)), after=2)

    assert set(briefs) == {"LimitExceeded a", "WarnOverLimit a"}


def test_who_was_above_for_long_is_forgiven_after_one_grace_period_below(guard):
    above, below = look(use(1, 11), use(2, 1)), look(use(1, 9), use(2, 1))
    for _ in range(20):  # it cannot be ended
        guard(above, after=20)
    guard(below)
    assert guard(below, after=GRACE - 0.5) == []
    assert guard(below, after=0.5) == []

    assert guard(above) == ["LimitExceeded a", "WarnOverLimit a"]
    assert guard(above, after=GRACE - 0.5) == []


def test_a_gpu_that_could_not_be_looked_at_stays_as_it_was(guard):
    guard(look(use(1, 11)))
    guard(after=GRACE / 2)

    assert guard(look(use(1, 11)), after=GRACE / 2) == ["TerminateProcess 1"]
    assert guard(after=KILL_AFTER_SECONDS) == []
    assert guard(look(use(1, 11))) == ["KillProcess 1"]
    assert guard(after=1) == []
    assert guard(look(use(1, 11))) == []


def test_a_gpu_that_misses_one_look_in_each_grace_period_is_guarded(guard):
    briefs = []
    for number in range(10):
        briefs += guard(*([look(use(1, 11))] if number % 4 else []), after=2)

    assert briefs == ["LimitExceeded a", "WarnOverLimit a", "TerminateProcess 1", "KillProcess 1"]


def test_what_is_known_of_one_gpu_does_not_hang_on_looks_at_another(guard):
    guard(look(use(1, 11)), look(use(2, 11), gpu=OTHER))
    for _ in range(int(LONGEST_GAP_SECONDS / 5) + 1):
        guard(look(use(2, 11), gpu=OTHER), after=5)

    assert guard(look(use(1, 11))) == ["LimitExceeded a", "WarnOverLimit a"]


def test_after_a_long_time_without_a_look_it_is_judged_anew(guard):
    guard(look(use(1, 11)))

    assert guard(look(use(1, 11)), after=60) == ["LimitExceeded a", "WarnOverLimit a"]


def test_who_stays_above_is_warned_of_again_every_few_minutes(guard):
    above = look(use(1, 11), shares=[share(A, policy="Warn")])
    briefs = [guard(above, after=10) for _ in range(int(2 * REPEAT_WARNING_SECONDS / 10) + 1)]

    assert [actions for actions in briefs if actions] == [
        ["LimitExceeded a", "WarnOverLimit a"],
        ["WarnOverLimit a"],
        ["WarnOverLimit a"],
    ]


def test_who_goes_up_and_down_is_warned_of_once_a_minute(guard):
    briefs = []
    for _ in range(12):
        briefs += guard(look(use(1, 11)), after=5)
        briefs += guard(look(use(1, 9)), after=5)

    assert briefs.count("LimitExceeded a") == 12
    assert briefs.count("WarnOverLimit a") == 2


def test_a_guard_that_warns_ends_nobody(guard):
    above = look(use(1, 11), shares=[share(A, policy="Warn")])
    guard(above)

    assert guard(above, after=GRACE) == []


def test_a_guard_that_is_off_does_nothing(guard):
    above = look(use(1, 11), shares=[share(A, policy="Off"), share(B)])

    assert guard(above) == []
    assert guard(above, after=GRACE) == []


def test_neighbours_are_judged_each_for_itself(guard):
    both = look(use(1, 11, A), use(2, 10, B), shares=[share(A), share(B)])

    assert guard(both) == ["LimitExceeded a", "WarnOverLimit a"]
    assert guard(both, after=GRACE) == ["TerminateProcess 1"]


def test_claims_that_a_container_uses_together_count_together(guard):
    shares = [share(A), share(B)]

    assert guard(look(use(1, 20, A, B), shares=shares)) == []
    assert guard(look(use(1, 15, A, B), use(2, 6, B), shares=shares)) == [
        "LimitExceeded a b",
        "WarnOverLimit a b",
    ]


def test_a_claim_that_fits_loses_nothing_because_of_one_that_shares_a_container_with_it(guard):
    """A is above by itself; what both use together is also too much, and B's is the largest."""
    shares = [share(A), share(B)]
    both = look(use(1, 7, A), use(2, 6, A), use(3, 8, B), use(4, 1, A, B), shares=shares)
    guard(both)

    assert guard(both, after=GRACE) == ["TerminateProcess 1"]


def test_a_claim_that_is_tied_to_one_that_was_above_for_long_keeps_its_grace_period(guard):
    shares = [share(A), share(B)]
    guard(look(use(1, 14, A), shares=shares))
    guard(look(use(1, 14, A), shares=shares), after=GRACE - 1)
    tied = look(use(1, 9, A), use(2, 12, A, B), shares=shares)

    assert guard(tied) == []
    assert guard(tied, after=GRACE - 0.5) == []
    assert guard(tied, after=0.5) == ["TerminateProcess 2"]


def test_two_claims_that_are_above_by_themselves_lose_one_process_each(guard):
    shares = [share(A), share(B)]
    both = look(use(1, 11, A), use(2, 12, B), use(3, 5, A, B), shares=shares)

    assert guard(both) == [
        "LimitExceeded a",
        "WarnOverLimit a",
        "LimitExceeded b",
        "WarnOverLimit b",
    ]
    assert guard(both, after=GRACE) == ["TerminateProcess 1", "TerminateProcess 2"]


def test_claims_of_one_container_that_are_above_are_judged_without_those_of_the_next():
    """C's process is the largest, and may be of B; but A and B are above whoever it is of."""
    shares = [share(A), share(B), share(C)]
    uses = [use(1, 12, A, B), use(2, 13, A, B), use(3, 14, B, C)]
    (group,) = claims_over_limit(look(*uses, shares=shares))

    assert group.claims == (A, B)
    assert [usage.process.pid for usage in group.usages] == [1, 2]


def test_claims_that_are_above_only_as_all_that_hang_together_are_found():
    shares = [share(A), share(B), share(C)]
    chain = look(use(1, 16, A, B), use(2, 15, B, C), shares=shares)

    assert [group.claims for group in claims_over_limit(chain)] == [(A, B, C)]


def test_a_claim_that_fits_whatever_is_counted_is_not_taken_along_by_those_it_hangs_on():
    """All four together are above; D fits even with all that may be D's."""
    shares = [share(A), share(B), share(C), share(D)]
    uses = [use(1, 16, A, B), use(2, 16, B, C), use(3, 0.5, C, D), use(4, 9, D)]
    (group,) = claims_over_limit(look(*uses, shares=shares))

    assert group.claims == (A, B, C)
    assert [usage.process.pid for usage in group.usages] == [1, 2]


def test_a_claim_that_fits_as_the_driver_counts_is_not_taken_along_either():
    shares = [share(A), share(B), share(C), share(D)]
    filling = replace(use(4, 0, D), memory_bytes=10 * GIB + (1 << 20))
    uses = [use(1, 16, A, B), use(2, 16, B, C), use(3, 0, C, D), filling]
    (group,) = claims_over_limit(look(*uses, shares=shares))

    assert group.claims == (A, B, C)


def test_who_fills_what_the_driver_lets_it_have_is_within_its_share(guard):
    def using(bytes_):
        return look(replace(use(1, 0), memory_bytes=bytes_))

    assert guard(using(10 * GIB + (2 << 20))) == []
    assert guard(using(10 * GIB + (2 << 20) + 1)) == ["LimitExceeded a", "WarnOverLimit a"]


def test_each_of_several_claims_may_have_what_the_driver_lets_it_have():
    def using(bytes_):
        return look(replace(use(1, 0, A, B), memory_bytes=bytes_), shares=[share(A), share(B)])

    assert claims_over_limit(using(20 * GIB + (4 << 20))) == ()
    assert claims_over_limit(using(20 * GIB + (4 << 20) + 1)) != ()


def test_a_claim_without_limit_frees_those_that_it_cannot_be_told_from(guard):
    shares = [share(A), MemoryShare(B, frozenset({POD}), None)]

    assert guard(look(use(1, 99, A, B), shares=shares)) == []
    assert guard(look(use(1, 99, A), shares=shares)) == ["LimitExceeded a", "WarnOverLimit a"]


def test_the_milder_guard_holds_for_claims_that_cannot_be_told_apart(guard):
    above = look(use(1, 21, A, B), shares=[share(A), share(B, policy="Warn")])
    guard(above)

    assert guard(above, after=GRACE) == []


def test_processes_that_come_and_go_do_not_start_the_grace_period_anew(guard):
    """Else a claim could stay above for ever by changing which claims it is tied to."""
    shares = [share(A), share(B), share(C)]
    guard(look(use(1, 31, A), shares=shares))
    for number in range(4):
        assert guard(look(use(1, 31, A), use(number + 2, 1, A, B), shares=shares)) == []
        assert guard(look(use(1, 31, A), use(number + 6, 1, A, C), shares=shares)) == []

    tied = look(use(1, 31, A), use(10, 25, A, B), shares=shares)
    assert guard(tied, after=2) == ["TerminateProcess 1"]


def test_memory_that_nvml_does_not_tell_is_not_counted_and_nobody_is_ended_for_it(guard):
    assert guard(look(use(1, None), use(2, 9))) == []
    above = look(use(1, None), use(2, 11))
    guard(above)
    assert guard(above, after=GRACE) == ["TerminateProcess 2"]


def test_processes_that_may_be_of_no_claim_are_nobodys_business(guard):
    stray = ProcessUsage(process(1), 99 * GIB, frozenset())

    assert guard(look(stray, use(2, 9))) == []


def test_a_process_on_two_gpus_is_asked_once(guard):
    above = [look(use(1, 11), gpu=GPU), look(use(1, 11), use(2, 1), gpu=OTHER)]
    guard(*above)

    assert guard(*above, after=GRACE) == ["TerminateProcess 1"]
    assert guard(*above, after=KILL_AFTER_SECONDS) == ["KillProcess 1"]


def test_a_process_that_was_killed_for_one_gpu_is_not_killed_for_another(guard):
    sample, other = look(use(1, 11), gpu=GPU), look(use(1, 11), gpu=OTHER)
    guard(sample, other)
    assert guard(sample, other, after=GRACE) == ["TerminateProcess 1"]
    assert guard(sample, other) == []
    assert guard(other, look(use(1, 9), gpu=GPU), after=KILL_AFTER_SECONDS) == ["KillProcess 1"]

    assert guard(sample, other) == []
    assert guard(other, sample) == []


def test_groups_are_in_the_order_of_their_claims():
    shares = [share(A), share(B), share(C)]
    seen = look(use(3, 11, C), use(1, 11, B), use(2, 11, A), shares=shares)

    assert [group.claims for group in claims_over_limit(seen)] == [(A,), (B,), (C,)]


def test_what_claims_use_is_told_for_each_and_in_proportion_where_it_is_not_known():
    shares = [share(A, 10), share(B, 30), share(C, 5), MemoryShare(D, frozenset(), None)]
    uses = [use(1, 20, A, B), use(2, 1, A), use(3, None, A), use(4, 9, A, D)]

    assert claim_usages(look(*uses, shares=shares)) == (
        ClaimMemoryUsage(GPU, A, 6.0 * GIB, 10 * GIB),
        ClaimMemoryUsage(GPU, B, 15.0 * GIB, 30 * GIB),
        ClaimMemoryUsage(GPU, C, 0.0, 5 * GIB),
    )


# ---- any sequence of looks


@st.composite
def worlds(draw):
    """Claims with their shares, and processes with the claims that they may be of."""
    claims = [A, B, C][: draw(st.integers(1, 3))]
    policies = st.sampled_from(["Kill", "Kill", "Warn", "Off"])
    shares = [
        share(
            claim,
            draw(st.one_of(st.none(), st.integers(1, 20), st.integers(1, 20))),
            draw(policies),
            draw(st.sampled_from([0.0, 3.0, 10.0])),
        )
        for claim in claims
    ]
    uses = [
        use(pid, draw(st.integers(0, 15)), *draw(st.sets(st.sampled_from(claims), min_size=1)))
        for pid in range(1, draw(st.integers(1, 5)) + 1)
    ]
    return look(*uses, shares=shares)


@st.composite
def histories(draw):
    """Looks at one GPU, a few seconds apart, while processes change what they use. None: the GPU
    did not answer."""
    first = draw(worlds())
    seen = []
    for _ in range(draw(st.integers(1, 25))):
        uses = tuple(
            replace(usage, memory_bytes=gib(draw(st.integers(0, 15))))
            for usage in first.usages
            if draw(st.integers(0, 9))
        )
        sample = replace(first, usages=uses) if draw(st.integers(0, 7)) else None
        seen.append((draw(st.sampled_from([0.5, 1.0, 2.0, 6.0])), sample))
    return seen


def certainly_above(seen, uids):
    """Said again in other words than the guard's own: who can be of nobody else."""
    members = [share for share in seen.shares if share.claim.uid in uids]
    if any(share.memory_bytes is None for share in members):
        return False
    used = sum(usage.memory_bytes for usage in seen.usages if usage.claims and usage.claims <= uids)
    return used > sum(share.memory_bytes + TOLERANCE_BYTES for share in members)


def fits(seen, uid):
    """Whatever is counted."""
    (limit,) = (share.memory_bytes for share in seen.shares if share.claim.uid == uid)
    most = sum(usage.memory_bytes for usage in seen.usages if uid in usage.claims)
    return limit is None or most <= limit + TOLERANCE_BYTES


def sets_of(seen):
    uids = sorted(share.claim.uid for share in seen.shares)
    sizes = range(1, len(uids) + 1)
    return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(uids, size)]


@given(worlds())
def test_every_group_is_certainly_above_and_no_claim_in_it_fits_its_share(seen):
    taken = set()
    for group in claims_over_limit(seen):
        uids = {claim.uid for claim in group.claims}
        assert certainly_above(seen, uids)
        assert not any(fits(seen, uid) for uid in uids)
        assert len(uids) == 1 or not any(certainly_above(seen, {uid}) for uid in uids)
        assert not taken & uids
        taken |= uids


@given(worlds())
def test_where_claims_are_certainly_above_some_are_found(seen):
    guarded = [share for share in seen.shares if share.guard.policy is not GuardPolicy.OFF]
    seen = replace(
        seen,
        shares=tuple(guarded),
        usages=tuple(
            usage for usage in seen.usages if usage.claims <= {g.claim.uid for g in guarded}
        ),
    )

    assert bool(claims_over_limit(seen)) == any(
        certainly_above(seen, uids) for uids in sets_of(seen)
    )


@given(histories())
def test_nothing_is_ended_before_its_claims_were_above_for_their_grace_period(history):
    excursions: GuardState = {}
    now, looked = 0.0, 0.0
    high, seconds = set(), {}  # claims above at the last look, and for how long until then
    for passed, seen in history:
        now += passed
        if seen is None:
            excursions, actions = guard_actions([], excursions, now)
            assert actions == ()
            continue
        above = {claim.uid for group in claims_over_limit(seen) for claim in group.claims}
        for uid in above & high:
            seconds[uid] = seconds.get(uid, 0.0) + now - looked
        high, looked = above, now
        excursions, actions = guard_actions([seen], excursions, now)
        policies = {share.claim.uid: share.guard for share in seen.shares}
        for action in actions:
            uids = {claim.uid for claim in action.group.claims}
            assert all(policies[uid].policy is not GuardPolicy.OFF for uid in uids)
            if isinstance(action, TerminateProcess | KillProcess):
                mine = action.usage.claims
                assert mine <= uids
                assert not any(fits(seen, uid) for uid in mine)
                assert all(policies[uid].policy is GuardPolicy.KILL for uid in uids)
                assert all(seconds.get(uid, 0.0) >= policies[uid].grace_seconds for uid in mine)
            if isinstance(action, TerminateProcess):
                sizes = [usage.memory_bytes for usage in seen.usages if usage.claims <= uids]
                assert action.usage.memory_bytes == max(sizes)


@given(worlds(), st.sets(st.integers(1, 5)), st.sampled_from([0.5, 1.0, 2.0]))
def test_in_the_end_no_claims_that_may_lose_a_process_are_above(seen, stubborn, seconds):
    """*stubborn*: processes that end only when they are killed."""
    excursions: GuardState = {}
    now = 0.0
    killed = []
    for _ in range(200):
        now += seconds
        excursions, actions = guard_actions([seen], excursions, now)
        gone = {
            action.usage.process
            for action in actions
            if isinstance(action, KillProcess)
            or (isinstance(action, TerminateProcess) and action.usage.process.pid not in stubborn)
        }
        killed += gone
        usages = tuple(usage for usage in seen.usages if usage.process not in gone)
        seen = replace(seen, usages=usages)

    assert all(group.guard.policy is GuardPolicy.WARN for group in claims_over_limit(seen))
    assert len(killed) == len(set(killed))
