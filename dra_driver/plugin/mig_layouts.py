"""Cuts GPUs as their layouts say, each when nothing uses it."""

import logging
from collections.abc import Callable, Collection, Hashable

from dra_driver.errors import NodeError
from dra_driver.model.devices import Gpu
from dra_driver.model.layouts import Book, Change, Outcome, State, Wanted
from dra_driver.model.mig import PartitionKey
from dra_driver.plan.mig.changes import Misfit, decide
from dra_driver.plugin.idle_gpus import IdleGpus
from dra_driver.plugin.mig_work import Kept, MigWork
from dra_driver.plugin.tries import Tries

log = logging.getLogger(__name__)

Keys = Collection[PartitionKey]


class MigLayouts:
    """For one thread."""

    def __init__(
        self, idle: IdleGpus, work: MigWork, book: Kept, tries: Tries, begin: Callable[[], None]
    ) -> None:
        """*begin* is called before anything is changed."""
        self._begin = begin
        self._idle = idle
        self._work = work
        self._book = book
        self._tries = tries

    def settle(self, gpu: Gpu, wanted: Wanted, claimed: Keys) -> Outcome:
        """Have *gpu* look as *wanted*, or what it looks like stay. *claimed*: what was cut for
        claims when *gpu* was looked at."""
        book = self._book.read()
        found = decide(gpu, wanted, book.made.get(gpu.uuid, ()), claimed)
        if _is_settled(gpu, found, book):
            return Outcome(wanted.layout, State.SUCCESS)
        if isinstance(found, Misfit) and found.always and gpu.uuid not in book.before:
            return Outcome(wanted.layout, State.FAILED, found.reason)
        facts = _facts(gpu, wanted)
        if why := self._tries.why_not(gpu.uuid, facts):
            return Outcome(wanted.layout, State.FAILED, why)
        if not _is_nothing(found):
            self._begin()
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
        found = decide(gpu, wanted, self._book.read().made.get(gpu.uuid, ()))
        if isinstance(found, Misfit):
            self._work.put_back(gpu)
            raise NodeError(found.reason)
        self._work.change(gpu, found)
        if not found.is_nothing:
            facts = {"device": gpu.name, "gpu": gpu.uuid, "layout": wanted.layout}
            log.info("a GPU was cut as its layout says", extra=facts)


def _is_settled(gpu: Gpu, found: Change | Misfit, book: Book) -> bool:
    if isinstance(found, Misfit) or not found.is_nothing or gpu.uuid in book.before:
        return False
    return found.made == book.made.get(gpu.uuid, ())


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
