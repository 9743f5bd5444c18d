"""Can more than one process compute on each GPU, or only as many as a claim wants?"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dra_driver.cli.disk_checks import Book
from dra_driver.cli.findings import Finding, fail, ok, skip, some, warn
from dra_driver.errors import NodeError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.holdings import Record
from dra_driver.model.steps import ComputeMode, SetComputeMode

MODES = "compute modes"

Read = Callable[[GpuUuid], ComputeMode | None]
"""Reads the compute mode of a GPU. None, or NodeError: it does not tell."""


def compute_modes(book: Callable[[], Book], gpus: Sequence[Gpu], read: Read) -> Iterator[Finding]:
    """*book* reads the ledger, which is done before and after: claims come and go meanwhile."""
    before = book()
    modes = {gpu: _mode(gpu, read) for gpu in gpus}
    records = [*before.records.values(), *book().records.values()]
    yield from of_modes(modes, records)


def of_modes(
    modes: Mapping[Gpu, ComputeMode | None], records: Iterable[Record]
) -> Iterator[Finding]:
    """*records*: of claims, which can have set a mode."""
    ours = {
        (step.gpu, step.mode): record.claim
        for record in records
        for step in record.steps
        if isinstance(step, SetComputeMode)
    }
    plain: list[str] = []
    for gpu, mode in modes.items():
        if mode is None:
            yield skip(MODES, f"{gpu.name} does not tell")
        elif mode is ComputeMode.DEFAULT:
            plain.append(gpu.name)
        elif (holder := ours.get((gpu.uuid, mode))) is not None:
            yield ok(MODES, f"{gpu.name} is in {mode.name}, for claim {holder}")
        else:
            yield _of_strange_mode(gpu, mode)
    if plain:
        yield ok(MODES, f"DEFAULT: {some(plain)}")


def _of_strange_mode(gpu: Gpu, mode: ComputeMode) -> Finding:
    text = f"{gpu.name} is in {mode.name}, which no claim of this node set"
    mend = f"on the host: nvidia-smi -i {gpu.pci_bus_id} -c DEFAULT"
    if mode is ComputeMode.PROHIBITED:
        return fail(MODES, f"{text}: nothing can compute there", mend)
    return warn(
        MODES,
        f"{text}: one process at a time can compute there, so claims cannot share it",
        f"{mend}; another MPS daemon leaves it so, and so does NVIDIA's DRA driver",
    )


def _mode(gpu: Gpu, read: Read) -> ComputeMode | None:
    try:
        return read(gpu.uuid)
    except NodeError:
        return None
