"""Cuts GPUs as their layouts say, each when nothing uses it."""

import logging
from collections.abc import Callable, Collection, Hashable

from dra_driver.errors import NodeError
from dra_driver.model.devices import Gpu
from dra_driver.model.layouts import Book, Change, Outcome, State, Wanted
from dra_driver.model.mig import PartitionKey
from dra_driver.plan.mig.changes import Misfit, decide
from dra_driver.plan.mig.identity import keys_of, known_by, still_there
from dra_driver.plugin.mig.idle import IdleGpus
from dra_driver.plugin.mig.tries import Tries
from dra_driver.plugin.mig.work import Kept, MigWork

log = logging.getLogger(__name__)

Keys = Collection[PartitionKey]


class MigLayouts:
    """For many threads, each GPU one thread's at a time."""

    def __init__(
        self, idle: IdleGpus, work: MigWork, book: Kept, tries: Tries, begin: Callable[[], None]
    ) -> None:
        """*begin* is called before anything is changed that did not fail the last time."""
        self._begin = begin
        self._idle = idle
        self._work = work
        self._book = book
        self._tries = tries

    def settle(self, gpu: Gpu, wanted: Wanted, claimed: Keys) -> Outcome:
        """Have *gpu* look as *wanted*, or what it looks like stay. *claimed*: what was cut for
        claims when *gpu* was looked at."""
        book = self._book.read()
        found = decide(gpu, wanted, _made(gpu, book), claimed)
        if _is_settled(gpu, found, book):
            self._tries.worked(gpu.uuid)
            return Outcome(wanted.layout, State.SUCCESS)
        if isinstance(found, Misfit) and found.always and gpu.uuid not in book.before:
            return Outcome(wanted.layout, State.FAILED, found.reason)
        facts = _facts(gpu, wanted)
        if why := self._tries.why_not(gpu.uuid, facts):
            return Outcome(wanted.layout, State.FAILED, why)
        try:
            waits = self._idle.change(gpu, lambda now: self._apply(now, wanted))
        except NodeError as e:
            self._tries.failed(gpu.uuid, facts, str(e))
            return Outcome(wanted.layout, State.FAILED, str(e))
        return _outcome(wanted, found, waits)

    def abandon(self, gpu: Gpu) -> str:
        """Put back what a change that nobody wants any more has begun; why not, or what it waits
        for."""
        try:
            return self._idle.change(gpu, self._work.put_back)
        except NodeError as e:
            return str(e)

    def _apply(self, gpu: Gpu, wanted: Wanted) -> None:
        """*gpu* is as it is now, and nothing on it is for claims."""
        book = self._book.read()
        found = decide(gpu, wanted, _made(gpu, book))
        if isinstance(found, Misfit):
            self._work.put_back(gpu)
            raise NodeError(found.reason)
        last = book.outcomes.get(gpu.uuid)
        if not found.is_nothing and not _is_failure(last, wanted):
            self._begin()
        self._work.change(gpu, found)
        if not found.is_nothing:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "layout": wanted.layout}
            log.info("a GPU was cut as its layout says", extra=facts)


def _made(gpu: Gpu, book: Book) -> frozenset[PartitionKey]:
    return keys_of(still_there(gpu, book.made.get(gpu.uuid, ())))


def _is_failure(last: Outcome | None, wanted: Wanted) -> bool:
    return last is not None and (last.layout, last.state) == (wanted.layout, State.FAILED)


def _is_settled(gpu: Gpu, found: Change | Misfit, book: Book) -> bool:
    if isinstance(found, Misfit) or not found.is_nothing or gpu.uuid in book.before:
        return False
    there = {known_by(one) for one in gpu.mig.instances} if gpu.mig else set()
    made = book.made.get(gpu.uuid, ())
    return set(made) <= there and found.made == tuple(one.key for one in made)


def _is_nothing(found: Change | Misfit) -> bool:
    return isinstance(found, Change) and found.is_nothing


def _outcome(wanted: Wanted, found: Change | Misfit, waits: str) -> Outcome:
    if not waits or _is_nothing(found):
        return Outcome(wanted.layout, State.SUCCESS)
    if isinstance(found, Misfit):
        waits = f"{waits}; then: {found.reason}"
    return Outcome(wanted.layout, State.PENDING, waits)


def _facts(gpu: Gpu, wanted: Wanted) -> Hashable:
    """What a try depends on."""
    return (wanted, gpu.mig.on, gpu.mig.pending, gpu.mig.taken) if gpu.mig else wanted
