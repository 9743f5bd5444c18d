"""Can the GPUs be cut that should be, and is what was cut of them whole and in use?

Where no GPU of the node can be cut there is nothing to tell.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dra_driver.cli.disk_checks import Book
from dra_driver.cli.findings import Finding, fail, ok, skip, some, warn
from dra_driver.cli.mig_blocks import odd_words, profile_name
from dra_driver.errors import DriverError
from dra_driver.model.devices import Gpu
from dra_driver.model.driver_files import DeviceFile
from dra_driver.model.holdings import Record
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import Fixed, Mig, OddInstance, PartitionKey
from dra_driver.model.offer import partition_name
from dra_driver.model.resets import by_hand
from dra_driver.plan.mig.gone import known_given_up, lost

MODES, INSTANCES, FILES = "MIG mode", "MIG instances", "MIG device files"

_MONITOR = "mig/monitor"  # the optional one: for who looks at all instances

Files = Callable[[tuple[str, ...]], Mapping[str, DeviceFile | None]]
"""The device files of capabilities, as they are; None: not there yet. DriverError: there is no such
capability."""


def modes(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    on: list[str] = []
    off: list[str] = []
    for gpu, mig in _cuttable(gpus):
        if mig.on != mig.pending:
            yield _of_pending(gpu, mig)
        else:
            (on if mig.on else off).append(gpu.name)
    said = [f"{word}: {some(names)}" for word, names in (("on", on), ("off", off)) if names]
    if said:
        yield ok(MODES, "; ".join(said))


def instances(look: Callable[[], Inventory], book: Callable[[], Book]) -> Iterator[Finding]:
    """*book* reads the ledger, before and after the *look* at the GPUs: claims come and go."""
    before = book().records
    gpus = look().gpus
    after = book().records
    both = [record for uid, record in after.items() if record == before.get(uid)]
    yield from of_instances(gpus, both, [*before.values(), *after.values()])


def of_instances(
    gpus: Sequence[Gpu], steady: Sequence[Record], known: Iterable[Record]
) -> Iterator[Finding]:
    """*steady*: records that were the same all the time; *known*: all that there were."""
    ours = {(h.gpu, h.partition) for record in known for h in record.holdings if h.cut}
    for gpu, mig in _cuttable(gpus):
        for one in mig.odd:
            if (gpu.uuid, one.key) not in ours:
                yield _of_odd(gpu, mig, one)
    yield from _of_vanished(gpus, steady)
    yield from _of_replaced(gpus, steady)
    foreign = [
        _name(gpu, mig, one.key)
        for gpu, mig in _cuttable(gpus)
        for one in mig.instances
        if (gpu.uuid, one.key) not in ours
    ]
    if foreign:
        yield ok(INSTANCES, f"not cut for claims, offered and left as they are: {some(foreign)}")
    if ours:
        yield ok(INSTANCES, f"cut for claims: {len(ours)}")


def device_files(look: Callable[[], Inventory], files: Files) -> Iterator[Finding]:
    """What a container needs beside the file of its GPU, for every instance that there is. None is
    made; where MIG mode is off everywhere, none is looked for."""
    if not any(mig.on for _, mig in _cuttable(look().gpus)):
        return
    try:
        try:
            yield from _of_files(look().gpus, files)
        except DriverError:  # an instance can have gone since the look, with its claim
            yield from _of_files(look().gpus, files)
    except DriverError as e:
        yield fail(
            FILES,
            str(e),
            "on the host: ls /proc/driver/nvidia/capabilities; is --host-root the host's /?",
        )


def _of_files(gpus: Sequence[Gpu], files: Files) -> list[Finding]:
    found = list(_cuttable(gpus))
    names = tuple(
        f"gpu{gpu.minor}/mig/gi{one.gi}{rest}"
        for gpu, mig in found
        for one in mig.instances
        for rest in ("", f"/ci{one.ci}")
    )
    there = files((*names, _MONITOR))
    absent = [name for name in names if there.get(name) is None]
    later = f", {len(absent)} of them made when a claim does" if absent else ""
    need = f"{len(names)} that the instances need{later}" if names else "none is needed now"
    said = [ok(FILES, need)]
    if _MONITOR not in there:
        said.append(skip(FILES, f"this driver has no {_MONITOR}: who looks on sees no instances"))
    return said


def _cuttable(gpus: Iterable[Gpu]) -> Iterator[tuple[Gpu, Mig]]:
    return ((gpu, gpu.mig) for gpu in gpus if gpu.mig is not None)


def _of_pending(gpu: Gpu, mig: Mig) -> Finding:
    now, then = ("on", "off") if mig.on else ("off", "on")
    return warn(
        MODES,
        f"{gpu.name}: it is {now}, and goes {then} with the next reset of the GPU",
        by_hand(gpu.pci_bus_id) if mig.fixed is Fixed.NOTHING else "drain and reboot the node",
    )


def _of_odd(gpu: Gpu, mig: Mig, one: OddInstance) -> Finding:
    at = f"-i {gpu.pci_bus_id} -gi {one.gi}"
    fill = "" if one.cis else f"give it one (nvidia-smi mig {at} -cci), or "
    first = f"nvidia-smi mig {at} -dci, then " if one.cis else ""
    return warn(
        INSTANCES,
        f"{gpu.name}, {profile_name(mig, one.key)} at {one.key.start}: {odd_words(one)}",
        f"{fill}remove it: {first}nvidia-smi mig {at} -dgi",
    )


def _of_vanished(gpus: Sequence[Gpu], steady: Iterable[Record]) -> Iterator[Finding]:
    for record in steady:
        for holding in lost(record, gpus):
            yield fail(
                INSTANCES,
                f"claim {record.claim} has {holding.device}, which is not there any more: somebody "
                "else removed it",
                "delete the pods of the claim, so that it is given back; and see who runs "
                "nvidia-smi mig -dgi here",
            )


def _of_replaced(gpus: Sequence[Gpu], steady: Iterable[Record]) -> Iterator[Finding]:
    """What is there again, and is not what the claim had, though it is called the same."""
    seen = {gpu.uuid for gpu, _ in _cuttable(gpus)}
    for record in steady:
        away = lost(record, gpus)
        for holding in known_given_up(record):
            if holding.gpu in seen and holding not in away:
                yield warn(
                    INSTANCES,
                    f"claim {record.claim} had {holding.device}, which was removed; somebody else "
                    "made another in its place, and its pods were told",
                    "delete the pods of the claim (and a claim that is not from a template) to "
                    "have one allocated anew",
                )


def _name(gpu: Gpu, mig: Mig, key: PartitionKey) -> str:
    partition = mig.partition(key)
    return partition_name(gpu, partition) if partition else f"{gpu.name}, {key}"
