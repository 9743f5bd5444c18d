"""What the memory guard does about claims that use more of a GPU's memory than they were given.

Claims that stay above their shares are brought below them: the largest of their processes is ended,
then the GPU is looked at again.

Every claim has a clock for each GPU. It runs while the claim is above at one sample and at the
next, stands still where that changed in between, and runs back while the claim stays below. So a
claim gains no more than the moment for which it is below, and loses nothing for one above. When the
clock shows the grace period, a process is ended. When it is back at zero, the overuse is over, and
a process that was asked to end and did not is forgiven. The overuse is over at once where such a
process is gone and that was enough: the processes after it are not to blame.

A GPU that could not be read has no sample. Its state stays until the next one, if that does not
come so late that too much can have happened in between.

A process of a container that uses several claims of a GPU may be of any of them. So claims are
*certainly* above their shares when the processes that can be of no other claim use more than their
shares together. All that NVML reports of a process counts, also what the CUDA context takes before
the program allocates anything (some hundred MiB): a claim has to hold that, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.processes import ContainerProcess
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.plan.memory.usage import GpuMemorySample, ProcessUsage, mildest_guard

TOLERANCE_BYTES: Final = 2 << 20
"""What a claim may use of each GPU beyond its share: drivers give memory out in pages of up to
2 MiB, and may count a limit of theirs in such pages. Who fills what the driver allows is within
its share."""

_Claims = frozenset[ClaimUid]


@frozen
class ClaimGroup:
    """Claims of one GPU, and the processes that can be of no other; mostly it is one claim."""

    gpu: GpuUuid
    claims: tuple[ClaimRef, ...]
    limit_bytes: int
    guard: GuardRules
    usages: tuple[ProcessUsage, ...]

    @property
    def used_bytes(self) -> int:
        return sum(use.memory_bytes or 0 for use in self.usages)

    @property
    def above(self) -> bool:
        """Whether they use more than they were given, and their guard is not off."""
        allowed = self.limit_bytes + TOLERANCE_BYTES * len(self.claims)
        return self.used_bytes > allowed and self.guard.policy is not GuardPolicy.OFF


def claims_over_limit(sample: GpuMemorySample) -> tuple[ClaimGroup, ...]:
    """The claims that are certainly above their shares; none is in two of the groups.

    A claim that fits its share whatever may be counted is in no group. Fewer claims go before more:
    a claim that is above by itself is judged by its own processes alone, not by those of claims
    that share a container with it. Claims that remain tied are judged again when it is below.
    """
    if not sample.usages:
        return ()
    groups: list[ClaimGroup] = []
    taken: set[ClaimUid] = set()
    for claims in _suspects(sample):
        if not taken & claims and (group := _group(sample, claims)).above:
            groups.append(group)
            taken |= claims
    return tuple(sorted(groups, key=lambda group: group.claims))


def _suspects(sample: GpuMemorySample) -> list[_Claims]:
    """The sets of claims that may be above: those of each container, and all that are tied by
    containers. To try every other set would take too long where many are tied."""
    allowed = {
        share.claim.uid: share.memory_bytes + TOLERANCE_BYTES
        for share in sample.shares
        if share.memory_bytes is not None
    }
    limited = [use for use in sample.usages if use.claims and allowed.keys() >= use.claims]
    containers = {use.claims for use in _in_doubt(limited, allowed)}
    return sorted(
        containers | set(_tied(containers)), key=lambda claims: (len(claims), sorted(claims))
    )


def _in_doubt(
    uses: Sequence[ProcessUsage], allowed: Mapping[ClaimUid, int]
) -> Sequence[ProcessUsage]:
    """Without the processes that may be of a claim that fits its share even with all of them: they
    are no reason to end anything. What others may use is less without them, so again and again."""
    while True:
        most: Counter[ClaimUid] = Counter()
        for use in uses:
            most.update(dict.fromkeys(use.claims, use.memory_bytes or 0))
        count = len(uses)
        uses = [use for use in uses if all(most[uid] > allowed[uid] for uid in use.claims)]
        if len(uses) == count:
            return uses


def _tied(sets: Iterable[_Claims]) -> list[_Claims]:
    """Claims that are tied by containers that use several of them."""
    tied: list[_Claims] = []
    for claims in sets:
        touching = [group for group in tied if group & claims]
        tied = [group for group in tied if not group & claims]
        tied.append(claims.union(*touching))
    return tied


def _group(sample: GpuMemorySample, claims: _Claims) -> ClaimGroup:
    """Each of *claims* is limited."""
    shares = sorted((s for s in sample.shares if s.claim.uid in claims), key=lambda s: s.claim)
    return ClaimGroup(
        gpu=sample.gpu,
        claims=tuple(share.claim for share in shares),
        limit_bytes=sum(share.memory_bytes or 0 for share in shares),
        guard=mildest_guard(share.guard for share in shares),
        usages=tuple(use for use in sample.usages if use.claims and use.claims <= claims),
    )


KILL_AFTER_SECONDS: Final = 5.0  # what a process has to end by itself, once it was asked to
REPEAT_WARNING_SECONDS: Final = 300.0  # while a group stays above
LONGEST_GAP_SECONDS: Final = 30.0  # between two samples of a GPU
_NEW_WARNING_SECONDS: Final = 60.0  # when it goes above again soon after it was below


@frozen
class LimitExceeded:
    """The group went above its share."""

    group: ClaimGroup


@frozen
class WarnOverLimit:
    """Say that the group is above its share."""

    group: ClaimGroup


@frozen
class TerminateProcess:
    """Ask the process to end."""

    group: ClaimGroup
    usage: ProcessUsage


@frozen
class KillProcess:
    """The process was asked and is still there: end it."""

    group: ClaimGroup
    usage: ProcessUsage


GuardAction = LimitExceeded | WarnOverLimit | TerminateProcess | KillProcess


@frozen
class Overuse:
    """One claim on one GPU: its clock, and when its last warning was."""

    above: bool  # at the last look
    seconds: float  # what the clock shows
    warned_at: float

    @property
    def is_over(self) -> bool:
        return not self.above and self.seconds <= 0


@frozen
class TerminatingProcess:
    """A process that was asked to end: when, for which claims, and whether it was killed since."""

    since: float
    claims: frozenset[ClaimUid]
    killed: bool = False


@frozen
class GpuGuardState:
    """What the guard remembers of one GPU from one sample to the next."""

    sampled_at: float  # when it was looked at
    claims: Mapping[ClaimUid, Overuse] = field(default_factory=dict)
    terminating: Mapping[ContainerProcess, TerminatingProcess] = field(default_factory=dict)


GuardState = Mapping[GpuUuid, GpuGuardState]


def guard_actions(
    samples: Sequence[GpuMemorySample], states_before: GuardState, now: float
) -> tuple[GuardState, tuple[GuardAction, ...]]:
    """What to do about *samples*, taken at *now* in seconds of any steady clock."""
    states = {
        gpu: state
        for gpu, state in states_before.items()
        if now - state.sampled_at <= LONGEST_GAP_SECONDS
    }
    actions: list[GuardAction] = []
    for sample in samples:
        previous = states.pop(sample.gpu, GpuGuardState(now))
        states[sample.gpu], gpu_actions = _judge(sample, previous, tuple(states.values()), now)
        actions += gpu_actions
    return states, tuple(actions)


def _judge(
    sample: GpuMemorySample,
    state_before: GpuGuardState,
    others: Sequence[GpuGuardState],
    now: float,
) -> tuple[GpuGuardState, list[GuardAction]]:
    """The new state of one GPU, and what to do about it."""
    groups = claims_over_limit(sample)
    claims = _below(sample, state_before, now)
    actions: list[GuardAction] = []
    for group in groups:
        warnings, excursions = _above(group, state_before, now)
        actions += warnings
        claims |= excursions
    ending = _still_terminating(sample, state_before, claims)
    terminating = _terminating((ending, *(state.terminating for state in others)))
    for group in groups:
        elapsed = min(claims[claim.uid].seconds for claim in group.claims)
        if group.guard.policy is GuardPolicy.KILL and elapsed >= group.guard.grace_seconds:
            terminations, processes = _end(group, terminating, now)
            actions += terminations
            ending |= processes
    return GpuGuardState(now, claims, ending), actions


def _below(sample: GpuMemorySample, before: GpuGuardState, now: float) -> dict[ClaimUid, Overuse]:
    """Every claim as if it were below, as long as it matters that it was above."""
    present = {use.process for use in sample.usages}
    gone = (
        overuse.claims for process, overuse in before.terminating.items() if process not in present
    )
    settled = frozenset[ClaimUid]().union(*gone)
    overuses: dict[ClaimUid, Overuse] = {}
    for uid, overuse in before.claims.items():
        run_back = 0.0 if overuse.above else now - before.sampled_at
        seconds = 0.0 if uid in settled else max(0.0, overuse.seconds - run_back)
        below = Overuse(False, seconds, overuse.warned_at)
        if not below.is_over or now - overuse.warned_at < _NEW_WARNING_SECONDS:
            overuses[uid] = below
    return overuses


def _above(
    group: ClaimGroup, before: GpuGuardState, now: float
) -> tuple[list[GuardAction], dict[ClaimUid, Overuse]]:
    """The warnings for a group that is above its share, and the clocks of its claims."""
    uids = [claim.uid for claim in group.claims]
    overuses = {uid: before.claims[uid] for uid in uids if uid in before.claims}
    goes_on = any(not overuse.is_over for overuse in overuses.values())
    interval = REPEAT_WARNING_SECONDS if goes_on else _NEW_WARNING_SECONDS
    last_warned = max((overuse.warned_at for overuse in overuses.values()), default=None)
    actions: list[GuardAction] = [] if goes_on else [LimitExceeded(group)]
    if last_warned is None or now - last_warned >= interval:
        actions.append(WarnOverLimit(group))
        last_warned = now
    since_sample = now - before.sampled_at
    elapsed = {
        uid: overuse.seconds + (since_sample if overuse.above else 0.0)
        for uid, overuse in overuses.items()
    }
    # A claim that was above for hours need not be below for hours before that is forgotten.
    grace_seconds = group.guard.grace_seconds
    return actions, {
        uid: Overuse(True, min(elapsed.get(uid, 0.0), grace_seconds), last_warned) for uid in uids
    }


def _still_terminating(
    sample: GpuMemorySample, before: GpuGuardState, claims: Mapping[ClaimUid, Overuse]
) -> dict[ContainerProcess, TerminatingProcess]:
    """The processes that were asked to end and are still there, as long as an overuse lasts."""
    present = {use.process for use in sample.usages}
    lasting = {uid for uid, termination in claims.items() if not termination.is_over}
    return {
        process: termination
        for process, termination in before.terminating.items()
        if process in present and termination.claims & lasting
    }


def _terminating(
    endings: Iterable[Mapping[ContainerProcess, TerminatingProcess]],
) -> dict[ContainerProcess, TerminatingProcess]:
    """All processes that are to end: one on several GPUs is asked once and killed once."""
    terminating: dict[ContainerProcess, TerminatingProcess] = {}
    for process, termination in (item for ending in endings for item in ending.items()):
        if process not in terminating or termination.killed:
            terminating[process] = termination
    return terminating


def _end(
    group: ClaimGroup, terminating: Mapping[ContainerProcess, TerminatingProcess], now: float
) -> tuple[list[GuardAction], dict[ContainerProcess, TerminatingProcess]]:
    """End the largest process of *group*, one at a time: its memory may be all that was too much.
    A process that cannot be killed keeps its neighbours alive, since it holds the memory."""
    under_way = [use for use in group.usages if use.process in terminating]
    if not under_way:
        largest = max(group.usages, key=lambda use: (use.memory_bytes or 0, use.process.started))
        return [TerminateProcess(group, largest)], {
            largest.process: TerminatingProcess(now, largest.claims)
        }
    actions: list[GuardAction] = []
    processes: dict[ContainerProcess, TerminatingProcess] = {}
    for use in under_way:
        termination = terminating[use.process]
        if not termination.killed and now - termination.since >= KILL_AFTER_SECONDS:
            actions.append(KillProcess(group, use))
            termination = replace(termination, killed=True)
        processes[use.process] = termination
    return actions, processes
