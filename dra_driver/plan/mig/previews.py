"""What a GPU looks like once its layout is applied, or why it stays as it is."""

from dataclasses import replace

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.layouts import Book, Change, Outcome, State, Wanted
from dra_driver.model.mig import Instance, Mig, PartitionKey
from dra_driver.plan.mig.changes import Misfit, decide
from dra_driver.plan.mig.identity import keys_of, still_there
from dra_driver.plan.mig.offered import Ours

_NO_ID = -1


def after_layout(
    gpu: Gpu, wanted: Wanted, book: Book, claimed: Ours, waits: str
) -> tuple[Gpu, Outcome | None]:
    """*gpu* as it looks when it looks as *wanted*, and nothing to be said of it; or *gpu* as it is,
    and how far its layout is.

    *waits*: what has to end before it can be changed. What *book* says of a layout that is not
    applied counts: only who tries it can know whether a board can be switched.
    """
    last = book.outcomes.get(gpu.uuid)
    if last is not None and last.layout == wanted.layout and last.state is not State.SUCCESS:
        return gpu, last
    ours = keys_of(still_there(gpu, book.made.get(gpu.uuid, ())))
    found = decide(gpu, wanted, ours, {key for uuid, key in claimed if uuid == gpu.uuid})
    if isinstance(found, Misfit):
        return gpu, _unfit(found, wanted, waits)
    if found.is_nothing:
        return gpu, Outcome(wanted.layout, State.SUCCESS)
    if waits or gpu.mig is None:
        return gpu, Outcome(wanted.layout, State.PENDING, waits)
    return replace(gpu, mig=_changed(gpu.mig, found)), None


def _unfit(found: Misfit, wanted: Wanted, waits: str) -> Outcome:
    if waits and not found.always:
        return Outcome(wanted.layout, State.PENDING, f"{waits}; then: {found.reason}")
    return Outcome(wanted.layout, State.FAILED, found.reason)


def _changed(mig: Mig, change: Change) -> Mig:
    instances = [one for one in mig.instances if one.key not in change.remove]
    instances += [_to_come(key) for key in change.cut]
    return replace(
        mig,
        on=mig.on if change.switch is None else change.switch,
        pending=mig.pending if change.switch is None else change.switch,
        instances=tuple(sorted(instances, key=lambda one: one.key)),
        odd=tuple(one for one in mig.odd if one.key not in change.remove),
    )


def _to_come(key: PartitionKey) -> Instance:
    """Nobody knows its ids and its UUID before it is there."""
    return Instance(key, _NO_ID, _NO_ID, GpuUuid(""))
