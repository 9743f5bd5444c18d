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


class Guard:
    """Looks one after another; what is done about each."""

    def __init__(self):
        self.state: GuardState = {}
        self.now = 1000.0

    def __call__(self, *looks, after=1.0):
        self.now += after
        self.state, actions = guard_actions(looks, self.state, self.now)
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
    return Guard()


EXCEEDED, WARNED = "LimitExceeded a", ("LimitExceeded a", "WarnOverLimit a")
AB, ABC = [share(A), share(B)], [share(A), share(B), share(C)]
HIGH, LOW = look(use(1, 11)), look(use(1, 9))
UNEVEN = look(use(1, 3), use(2, 9))
TWO, LARGE = look(use(1, 12), use(2, 20)), look(use(1, 11), use(2, 20))
YOUNG = look(use(1, 6, started=7), use(2, 6, started=5))
NEXT = look(use(2, 3), use(3, 9))
WARN, OFF = (look(use(1, 11), shares=[share(A, policy=policy)]) for policy in ("Warn", "Off"))
NEIGHBOURS = look(use(1, 11, A), use(2, 10, B), shares=AB)
EITHER = look(use(1, 7), use(2, 6), use(3, 8, B), use(4, 1, A, B), shares=AB)
BOTH = look(use(1, 11, A), use(2, 12, B), use(3, 5, A, B), shares=AB)
ALONE, TIED = look(use(1, 14), shares=AB), look(use(1, 9), use(2, 12, A, B), shares=AB)
MILD = look(use(1, 21, A, B), shares=[share(A), share(B, policy="Warn")])
FREE = [share(A), MemoryShare(B, frozenset({POD}), None)]
UNKNOWN = look(use(1, None), use(2, 11))
STRAY = ProcessUsage(process(1), 99 * GIB, frozenset())
END_1, END_2 = "TerminateProcess 1", "TerminateProcess 2"
KILL_1, KILL_2 = "KillProcess 1", "KillProcess 2"

# Seconds since the look before, what is seen, and what is done about it.
STORIES = {
    "a claim within its share is left alone": [(1, look(use(1, 6), use(2, 4)))],
    "a claim above its share is warned of once": [(1, HIGH, *WARNED), (1, HIGH)],
    "the processes of a claim count together": [(1, look(use(1, 6), use(2, 6)), *WARNED)],
    "the largest process is asked to end after the grace period, and killed once": [
        (1, UNEVEN, *WARNED),
        (GRACE - 0.5, UNEVEN),
        (0.5, UNEVEN, END_2),
        (KILL_AFTER_SECONDS - 0.1, UNEVEN),
        (0.1, UNEVEN, KILL_2),
        (KILL_AFTER_SECONDS, UNEVEN),
    ],
    "of equal processes the youngest is ended": [(1, YOUNG, *WARNED), (GRACE, YOUNG, END_1)],
    "where one was not enough the next follows at once": [
        (1, TWO, *WARNED),
        (GRACE, TWO, END_2),
        (1, look(use(1, 12)), END_1),
    ],
    "a process that frees its memory when asked is not killed": [
        (1, HIGH, *WARNED),
        (GRACE, HIGH, END_1),
        *[(KILL_AFTER_SECONDS, LOW)] * 4,
        (1, HIGH, EXCEEDED),
        (GRACE, HIGH, END_1),
    ],
    "a process that frees its memory for a moment only is killed": [
        (1, HIGH, *WARNED),
        (GRACE, HIGH, END_1),
        (KILL_AFTER_SECONDS, LOW),
        (1, HIGH, KILL_1),
    ],
    "a process that ended does not have the next one forgiven": [
        (1, LARGE, *WARNED),
        (GRACE, LARGE, END_2),
        (1, HIGH, END_1),
        (1, LOW),
        (KILL_AFTER_SECONDS, HIGH, KILL_1),
    ],
    "what comes after a process that ended has a whole grace period": [
        (1, HIGH, *WARNED),
        (GRACE, HIGH, END_1),
        (1, look(use(2, 3))),
        (1, NEXT, EXCEEDED),
        (GRACE - 0.5, NEXT),
        (0.5, NEXT, "TerminateProcess 3"),
    ],
    "another process with the same number is another one": [
        (1, HIGH, *WARNED),
        (GRACE, HIGH, END_1),
        (KILL_AFTER_SECONDS, look(use(1, 11, started=2)), END_1),
    ],
    "below for a moment and the grace period begins anew": [
        (1, HIGH, *WARNED),
        (GRACE / 2, LOW),
        (1, HIGH, EXCEEDED),
        (GRACE - 0.5, HIGH),
        (0.5, HIGH, END_1),
    ],
    "after a long time without a look it is judged anew": [
        (1, HIGH, *WARNED),
        (60, HIGH, *WARNED),
    ],
    "a guard that warns ends nobody": [(1, WARN, *WARNED), (GRACE, WARN)],
    "a guard that is off does nothing": [(1, OFF), (GRACE, OFF)],
    "neighbours are judged each for itself": [(1, NEIGHBOURS, *WARNED), (GRACE, NEIGHBOURS, END_1)],
    "claims that a container uses together count together": [
        (1, look(use(1, 20, A, B), shares=AB)),
        (
            1,
            look(use(1, 15, A, B), use(2, 6, B), shares=AB),
            "LimitExceeded a b",
            "WarnOverLimit a b",
        ),
    ],
    # A is above by itself; what both use together is also too much, and B's is the largest.
    "a claim that fits loses nothing because of one that shares a container with it": [
        (1, EITHER, *WARNED),
        (GRACE, EITHER, END_1),
    ],
    "a claim that is tied to one that was above for long keeps its grace period": [
        (1, ALONE, *WARNED),
        (GRACE - 1, ALONE),
        (1, TIED),
        (GRACE - 0.5, TIED),
        (0.5, TIED, END_2),
    ],
    "two claims that are above by themselves lose one process each": [
        (1, BOTH, *WARNED, "LimitExceeded b", "WarnOverLimit b"),
        (GRACE, BOTH, END_1, END_2),
    ],
    "a claim without limit frees those that it cannot be told from": [
        (1, look(use(1, 99, A, B), shares=FREE)),
        (1, look(use(1, 99, A), shares=FREE), *WARNED),
    ],
    "the milder guard holds for claims that cannot be told apart": [
        (1, MILD, "LimitExceeded a b", "WarnOverLimit a b"),
        (GRACE, MILD),
    ],
    "memory that NVML does not tell is not counted and nobody is ended for it": [
        (1, look(use(1, None), use(2, 9))),
        (1, UNKNOWN, *WARNED),
        (GRACE, UNKNOWN, END_2),
    ],
    "processes that may be of no claim are nobody's business": [(1, look(STRAY, use(2, 9)))],
    # What the driver lets a claim have, it may fill.
    "a claim that fills its share in pages is within it": [
        (1, look(replace(use(1, 0), memory_bytes=10 * GIB + TOLERANCE_BYTES))),
        (1, look(replace(use(1, 0), memory_bytes=10 * GIB + TOLERANCE_BYTES + 1)), *WARNED),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_guard_ends_the_right_process_at_the_right_time(guard, story):
    for after, sample, *actions in story:
        assert guard(sample, after=after) == actions


def test_below_in_every_fifth_look_does_not_save_a_process(guard):
    briefs = []
    for number in range(20):
        briefs += guard(HIGH if number % 5 else LOW, after=2)

    assert briefs == [*WARNED, END_1, KILL_1]


def test_above_in_every_fifth_look_ends_nobody(guard):
    briefs = []
    for number in range(200):
        briefs += guard(LOW if number % 5 else HIGH, after=2)

    assert set(briefs) == set(WARNED)


def test_who_was_above_for_long_is_forgiven_after_one_grace_period_below(guard):
    above, below = look(use(1, 11), use(2, 1)), look(use(1, 9), use(2, 1))
    for _ in range(20):  # it cannot be ended
        guard(above, after=20)
    guard(below)
    assert guard(below, after=GRACE - 0.5) == []
    assert guard(below, after=0.5) == []

    assert guard(above) == list(WARNED)
    assert guard(above, after=GRACE - 0.5) == []


def test_a_gpu_that_could_not_be_looked_at_stays_as_it_was(guard):
    guard(HIGH)
    guard(after=GRACE / 2)

    assert guard(HIGH, after=GRACE / 2) == [END_1]
    assert guard(after=KILL_AFTER_SECONDS) == []
    assert guard(HIGH) == [KILL_1]
    assert guard(after=1) == []
    assert guard(HIGH) == []


def test_a_gpu_that_misses_one_look_in_each_grace_period_is_guarded(guard):
    briefs = []
    for number in range(10):
        briefs += guard(*([HIGH] if number % 4 else []), after=2)

    assert briefs == [*WARNED, END_1, KILL_1]


def test_what_is_known_of_one_gpu_does_not_hang_on_looks_at_another(guard):
    guard(HIGH, look(use(2, 11), gpu=OTHER))
    for _ in range(int(LONGEST_GAP_SECONDS / 5) + 1):
        guard(look(use(2, 11), gpu=OTHER), after=5)

    assert guard(HIGH) == list(WARNED)


def test_who_stays_above_is_warned_of_again_every_few_minutes(guard):
    briefs = [guard(WARN, after=10) for _ in range(int(2 * REPEAT_WARNING_SECONDS / 10) + 1)]

    assert [actions for actions in briefs if actions] == [list(WARNED), *[["WarnOverLimit a"]] * 2]


def test_who_goes_up_and_down_is_warned_of_once_a_minute(guard):
    briefs = []
    for _ in range(12):
        briefs += [*guard(HIGH, after=5), *guard(LOW, after=5)]

    assert briefs.count("LimitExceeded a") == 12
    assert briefs.count("WarnOverLimit a") == 2


@pytest.mark.parametrize(
    ("processes", "claims", "pids"),
    [
        # C's process is the largest, and may be of B; but A and B are above whoever it is of.
        ("12ab 13ab 14bc", "ab", [1, 2]),
        ("16ab 15bc", "abc", [1, 2]),  # only as all that are tied
        ("16ab 16bc 0.5cd 9d", "abc", [1, 2]),  # D fits even with all that may be D's,
        ("16ab 16bc 0cd 10.001953125d", "abc", [1, 2]),  # also with 2 MiB beyond its share
        ("20.00390625ab", "", []),  # each may have 2 MiB beyond its share
        ("20.00390626ab", "ab", [1]),
        ("11c 11b 11a", "a b c", [3, 2, 1]),  # in the order of their claims
        ("", "", []),  # nobody uses anything
    ],
)
def test_which_claims_are_certainly_above_together(processes, claims, pids):
    """*processes*: so many GiB each, of one of the claims of 10 GiB whose letters follow."""
    refs = {claim.name: claim for claim in (A, B, C, D)}
    uses = [
        use(pid, float(text.rstrip("abcd")), *(refs[name] for name in text.lstrip(".0123456789")))
        for pid, text in enumerate(processes.split(), start=1)
    ]
    groups = claims_over_limit(look(*uses, shares=map(share, (A, B, C, D))))

    assert " ".join("".join(claim.name for claim in group.claims) for group in groups) == claims
    assert [usage.process.pid for group in groups for usage in group.usages] == pids


def test_processes_that_come_and_go_do_not_start_the_grace_period_anew(guard):
    """Else a claim could stay above for ever by changing which claims it is tied to."""
    guard(look(use(1, 31, A), shares=ABC))
    for number in range(4):
        assert guard(look(use(1, 31, A), use(number + 2, 1, A, B), shares=ABC)) == []
        assert guard(look(use(1, 31, A), use(number + 6, 1, A, C), shares=ABC)) == []

    tied = look(use(1, 31, A), use(10, 25, A, B), shares=ABC)
    assert guard(tied, after=2) == [END_1]


def test_a_process_on_two_gpus_is_asked_once(guard):
    above = [HIGH, look(use(1, 11), use(2, 1), gpu=OTHER)]
    guard(*above)

    assert guard(*above, after=GRACE) == [END_1]
    assert guard(*above, after=KILL_AFTER_SECONDS) == [KILL_1]


def test_a_process_that_was_killed_for_one_gpu_is_not_killed_for_another(guard):
    other = look(use(1, 11), gpu=OTHER)
    guard(HIGH, other)
    assert guard(HIGH, other, after=GRACE) == [END_1]
    assert guard(HIGH, other) == []
    assert guard(other, LOW, after=KILL_AFTER_SECONDS) == [KILL_1]

    assert guard(HIGH, other) == []
    assert guard(other, HIGH) == []


def test_what_claims_use_is_told_for_each_and_in_proportion_where_it_is_not_known():
    shares = [share(A, 10), share(B, 30), share(C, 5), MemoryShare(D, frozenset(), None)]
    uses = [use(1, 20, A, B), use(2, 1, A), use(3, None, A), use(4, 9, A, D)]

    assert claim_usages(look(*uses, shares=shares)) == (
        ClaimMemoryUsage(GPU, A, 6.0 * GIB, 10 * GIB),
        ClaimMemoryUsage(GPU, B, 15.0 * GIB, 30 * GIB),
        ClaimMemoryUsage(GPU, C, 0.0, 5 * GIB),
    )
    (alone,) = claim_usages(HIGH)
    assert alone.used_bytes == 11 * GIB


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
    history = []
    for _ in range(draw(st.integers(1, 25))):
        uses = tuple(
            replace(usage, memory_bytes=gib(draw(st.integers(0, 15))))
            for usage in first.usages
            if draw(st.integers(0, 9))
        )
        sample = replace(first, usages=uses) if draw(st.integers(0, 7)) else None
        history.append((draw(st.sampled_from([0.5, 1.0, 2.0, 6.0])), sample))
    return history


def certainly_above(sample, uids):
    """Said again in other words than the guard's own: who can be of nobody else."""
    members = [share for share in sample.shares if share.claim.uid in uids]
    if any(share.memory_bytes is None for share in members):
        return False
    used = sum(
        usage.memory_bytes for usage in sample.usages if usage.claims and usage.claims <= uids
    )
    return used > sum(share.memory_bytes + TOLERANCE_BYTES for share in members)


def fits(sample, uid):
    """Whatever is counted."""
    (limit,) = (share.memory_bytes for share in sample.shares if share.claim.uid == uid)
    most = sum(usage.memory_bytes for usage in sample.usages if uid in usage.claims)
    return limit is None or most <= limit + TOLERANCE_BYTES


def sets_of(sample):
    uids = sorted(share.claim.uid for share in sample.shares)
    sizes = range(1, len(uids) + 1)
    return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(uids, size)]


@given(worlds())
def test_every_group_is_certainly_above_and_no_claim_in_it_fits_its_share(sample):
    taken = set()
    for group in claims_over_limit(sample):
        uids = {claim.uid for claim in group.claims}
        assert certainly_above(sample, uids)
        assert not any(fits(sample, uid) for uid in uids)
        assert len(uids) == 1 or not any(certainly_above(sample, {uid}) for uid in uids)
        assert not taken & uids
        taken |= uids


@given(worlds())
def test_where_claims_are_certainly_above_some_are_found(sample):
    guarded = [share for share in sample.shares if share.guard.policy is not GuardPolicy.OFF]
    sample = replace(
        sample,
        shares=tuple(guarded),
        usages=tuple(
            usage for usage in sample.usages if usage.claims <= {g.claim.uid for g in guarded}
        ),
    )

    assert bool(claims_over_limit(sample)) == any(
        certainly_above(sample, uids) for uids in sets_of(sample)
    )


@given(histories())
def test_nothing_is_ended_before_its_claims_were_above_for_their_grace_period(history):
    states: GuardState = {}
    now, looked = 0.0, 0.0
    high, seconds = set(), {}  # claims above at the last look, and for how long until then
    for passed, sample in history:
        now += passed
        if sample is None:
            states, actions = guard_actions([], states, now)
            assert actions == ()
            continue
        above = {claim.uid for group in claims_over_limit(sample) for claim in group.claims}
        for uid in above & high:
            seconds[uid] = seconds.get(uid, 0.0) + now - looked
        high, looked = above, now
        states, actions = guard_actions([sample], states, now)
        policies = {share.claim.uid: share.guard for share in sample.shares}
        for action in actions:
            uids = {claim.uid for claim in action.group.claims}
            assert all(policies[uid].policy is not GuardPolicy.OFF for uid in uids)
            if isinstance(action, TerminateProcess | KillProcess):
                owners = action.usage.claims
                assert owners <= uids
                assert not any(fits(sample, uid) for uid in owners)
                assert all(policies[uid].policy is GuardPolicy.KILL for uid in uids)
                assert all(seconds.get(uid, 0.0) >= policies[uid].grace_seconds for uid in owners)
            if isinstance(action, TerminateProcess):
                sizes = [usage.memory_bytes for usage in sample.usages if usage.claims <= uids]
                assert action.usage.memory_bytes == max(sizes)


@given(worlds(), st.sets(st.integers(1, 5)), st.sampled_from([0.5, 1.0, 2.0]))
def test_in_the_end_no_claims_that_may_lose_a_process_are_above(sample, stubborn, seconds):
    """*stubborn*: processes that end only when they are killed."""
    states: GuardState = {}
    now = 0.0
    killed = []
    for _ in range(200):
        now += seconds
        states, actions = guard_actions([sample], states, now)
        gone = {
            action.usage.process
            for action in actions
            if isinstance(action, KillProcess)
            or (isinstance(action, TerminateProcess) and action.usage.process.pid not in stubborn)
        }
        killed += gone
        usages = tuple(usage for usage in sample.usages if usage.process not in gone)
        sample = replace(sample, usages=usages)

    assert all(group.guard.policy is GuardPolicy.WARN for group in claims_over_limit(sample))
    assert len(killed) == len(set(killed))
