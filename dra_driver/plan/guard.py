"""What the memory guard does about claims that use more of a GPU's memory than they were given.

Claims that stay above their shares (``dra_driver.plan.outliers``) are brought below them by ending
the largest of their processes, then looking again.

Every claim has a clock for each GPU. It goes on while the claim is above at one look and at the
next, stands still where that changed in between, and runs back while the claim stays below. So who
is below for a moment gains no more than that moment, and who is above for a moment loses nothing.
When it shows the grace period, something is ended; when it is back at nothing, the excursion is
over, and a process that was asked to end and did not is forgiven. The excursion is over at once
where a process that was asked is gone and that was enough: what comes after it is not to blame.

A GPU that could not be looked at is not in a look. What is known of it stays as it is until the
next one, if that is not so late that nobody knows what was in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.processes import Process
from dra_driver.model.profiles import GuardPolicy
from dra_driver.plan.memory_look import GpuLook, Use
from dra_driver.plan.outliers import Group, outliers

KILL_AFTER_SECONDS: Final = 5.0  # what a process has to end by itself, once it was asked to
TELL_AGAIN_SECONDS: Final = 300.0  # while a group stays above
LONGEST_GAP_SECONDS: Final = 30.0  # between two looks at a GPU
_TELL_ANEW_SECONDS: Final = 60.0  # when it goes above again soon after it was below


@dataclass(frozen=True, slots=True)
class Began:
    """The group went above its share."""

    group: Group


@dataclass(frozen=True, slots=True)
class Warn:
    """Say that the group is above its share."""

    group: Group


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end."""

    group: Group
    use: Use


@dataclass(frozen=True, slots=True)
class Kill:
    """The process was asked and is still there: end it."""

    group: Group
    use: Use


Action = Began | Warn | Terminate | Kill


@dataclass(frozen=True, slots=True)
class Excursion:
    """One claim on one GPU: its clock, and when it was last said that it is above."""

    above: bool  # at the last look
    seconds: float  # what the clock shows
    told: float

    @property
    def over(self) -> bool:
        return not self.above and self.seconds <= 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A process that was asked to end: when, for which claims, and whether it was killed since."""

    since: float
    claims: frozenset[ClaimUid]
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """What the guard remembers of one GPU from one look to the next."""

    at: float  # when it was looked at
    claims: Mapping[ClaimUid, Excursion] = field(default_factory=dict)
    ending: Mapping[Process, Ending] = field(default_factory=dict)


Excursions = Mapping[GpuUuid, Known]


def decide(
    seen: Sequence[GpuLook], before: Excursions, now: float
) -> tuple[Excursions, tuple[Action, ...]]:
    """What is to be done about what was *seen* at *now*, in seconds of any steady clock."""
    known = {gpu: one for gpu, one in before.items() if now - one.at <= LONGEST_GAP_SECONDS}
    actions: list[Action] = []
    for look in seen:
        earlier = known.pop(look.gpu, Known(now))
        known[look.gpu], done = _judge(look, earlier, tuple(known.values()), now)
        actions += done
    return known, tuple(actions)


def _judge(
    look: GpuLook, before: Known, others: Sequence[Known], now: float
) -> tuple[Known, list[Action]]:
    """What to do about one GPU, and what is known of it from now on."""
    groups = outliers(look)
    claims = _below(look, before, now)
    actions: list[Action] = []
    for group in groups:
        said, excursions = _above(group, before, now)
        actions += said
        claims |= excursions
    ending = _still_asked(look, before, claims)
    asked = _asked((ending, *(one.ending for one in others)))
    for group in groups:
        shown = min(claims[claim.uid].seconds for claim in group.claims)
        if group.guard.policy is GuardPolicy.KILL and shown >= group.guard.grace_seconds:
            done, processes = _end(group, asked, now)
            actions += done
            ending |= processes
    return Known(now, claims, ending), actions


def _below(look: GpuLook, before: Known, now: float) -> dict[ClaimUid, Excursion]:
    """Every claim as if it were below, for as long as it matters that it was above."""
    present = {use.process for use in look.uses}
    gone = (one.claims for process, one in before.ending.items() if process not in present)
    settled = frozenset[ClaimUid]().union(*gone)
    found: dict[ClaimUid, Excursion] = {}
    for uid, one in before.claims.items():
        run_back = 0.0 if one.above else now - before.at
        seconds = 0.0 if uid in settled else max(0.0, one.seconds - run_back)
        below = Excursion(False, seconds, one.told)
        if not below.over or now - one.told < _TELL_ANEW_SECONDS:
            found[uid] = below
    return found


def _above(
    group: Group, before: Known, now: float
) -> tuple[list[Action], dict[ClaimUid, Excursion]]:
    """What to say of a group that is above its share, and what the clocks of its claims show."""
    uids = [claim.uid for claim in group.claims]
    earlier = {uid: before.claims[uid] for uid in uids if uid in before.claims}
    goes_on = any(not one.over for one in earlier.values())
    again = TELL_AGAIN_SECONDS if goes_on else _TELL_ANEW_SECONDS
    told = max((one.told for one in earlier.values()), default=None)
    actions: list[Action] = [] if goes_on else [Began(group)]
    if told is None or now - told >= again:
        actions.append(Warn(group))
        told = now
    passed = now - before.at
    shown = {uid: one.seconds + (passed if one.above else 0.0) for uid, one in earlier.items()}
    # Who was above for hours is not to be below for hours before that is forgotten.
    most = group.guard.grace_seconds
    return actions, {uid: Excursion(True, min(shown.get(uid, 0.0), most), told) for uid in uids}


def _still_asked(
    look: GpuLook, before: Known, claims: Mapping[ClaimUid, Excursion]
) -> dict[Process, Ending]:
    """The processes that were asked to end and are still there, as long as an excursion lasts."""
    present = {use.process for use in look.uses}
    lasting = {uid for uid, one in claims.items() if not one.over}
    return {
        process: one
        for process, one in before.ending.items()
        if process in present and one.claims & lasting
    }


def _asked(endings: Iterable[Mapping[Process, Ending]]) -> dict[Process, Ending]:
    """All that are to end: who uses several GPUs is asked once and killed once."""
    asked: dict[Process, Ending] = {}
    for process, one in (item for ending in endings for item in ending.items()):
        if process not in asked or one.killed:
            asked[process] = one
    return asked


def _end(
    group: Group, asked: Mapping[Process, Ending], now: float
) -> tuple[list[Action], dict[Process, Ending]]:
    """End the largest process of *group*, one at a time: its memory may be all there was too
    much. One that cannot even be killed keeps its neighbours alive, since it holds the memory."""
    under_way = [use for use in group.uses if use.process in asked]
    if not under_way:
        largest = max(group.uses, key=lambda use: (use.memory_bytes or 0, use.process.started))
        return [Terminate(group, largest)], {largest.process: Ending(now, largest.claims)}
    actions: list[Action] = []
    processes: dict[Process, Ending] = {}
    for use in under_way:
        one = asked[use.process]
        if not one.killed and now - one.since >= KILL_AFTER_SECONDS:
            actions.append(Kill(group, use))
            one = replace(one, killed=True)
        processes[use.process] = one
    return actions, processes
