"""The one door to NVML: every call bounded, every error ours."""

import ctypes
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from dra_driver.errors import NodeError
from dra_driver.model.resets import by_hand
from dra_driver.model.uuids import GpuUuid
from dra_driver.node import nvml_readers
from dra_driver.node.mig.geometry import Geometries
from dra_driver.node.nvlink import Links
from dra_driver.node.nvml_changes import UnderChange
from dra_driver.node.nvml_codes import NEW_SESSION, code
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_late import Late
from dra_driver.node.nvml_listing import Listing, named, not_listed
from dra_driver.node.nvml_threads import Submit, Threads
from dra_driver.node.nvml_values import Facts, Glance, System
from dra_driver.node.worker import Pending

log = logging.getLogger(__name__)
T = TypeVar("T")

FactsByIndex = Mapping[int, Facts | NodeError]
LinksByIndex = Mapping[int, Links | NodeError]

_MENDS: Final[Mapping[int, str]] = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel driver; nvidia-smi has to work",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, or point to its driver root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was changed in use: reboot the node",
    pynvml.NVML_ERROR_GPU_IS_LOST: "it fell off the bus: drain and reboot the node",
    pynvml.NVML_ERROR_RESET_REQUIRED: by_hand("..."),
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "check its power cables",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its infoROM is damaged: replace the board",
    pynvml.NVML_ERROR_NO_PERMISSION: "run this as root, privileged, with access to device nodes",
}


def load_nvml(library: Path | None) -> Functions:
    """pynvml over *library* (``libnvidia-ml.so.1`` of the driver root), or what the linker finds.

    In a container the library is not where the linker looks. It is loaded by the path it resolves
    to, so that another driver's library, installed while this process runs, is taken at the next
    start of NVML. NodeError: it cannot be loaded.
    """
    if library is not None:
        path = str(library.resolve())
        if pynvml.nvmlLib is None or pynvml.nvmlLib._name != path:
            try:
                loaded = ctypes.CDLL(path)
            except OSError as error:
                raise NodeError(
                    f"cannot load NVML from {library}: {error}; is the driver complete?"
                ) from error
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml.nvmlLib = loaded
    return pynvml  # type: ignore[no-any-return]


@contextmanager
def nvml_errors(doing: str) -> Iterator[None]:
    """What NVML raises becomes a NodeError: what was being done, and what to do about it."""
    try:
        yield
    except pynvml.NVMLError as error:
        mend = _MENDS.get(error.value)
        raise NodeError(f"{doing}: NVML says {error}" + (f"; {mend}" if mend else "")) from error
    except pynvml.NVMLLibraryMismatchError as error:
        raise NodeError(
            f"{doing}: {error}; {_MENDS[pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]}"
        ) from error


_STOP_SECONDS: Final = 1.0


class Nvml:
    """NVML on a thread for the system and one for each GPU, so a hung GPU stops only itself.

    ``load`` gives the functions (``load_nvml`` or a simulation) each time NVML is started. NVML
    lists the GPUs that there are when it is started: ``restart`` finds those that came later.
    """

    def __init__(self, load: Callable[[], Functions], deadline_seconds: float = 5.0) -> None:
        self._load = load
        self._functions: Functions | None = None
        self._initialised: Functions | None = None  # belongs to the system's thread
        self._session = 0
        self._stale = False
        self._threads = Threads(deadline_seconds)
        self._listing, self._late = Listing(), Late()  # of this session
        self._known: System | None = None  # of this session
        self._gate = threading.Lock()  # nothing is submitted while NVML is stopped and started

    def system(self) -> System:
        """Driver and number of GPUs; starts NVML if need be. NodeError: the driver is not ready."""
        with self._gate:
            if self._functions is None or (self._stale and self._threads.idle):
                self._start()
            known = self._known
            pending = self._threads.read_system("reading the driver", self._read_system)
        try:
            if known and not pending.wait(self._threads.behind()):
                return known
            return pending.result()
        except NodeError as error:
            self._judge(error)
            raise

    def restart(self) -> bool:
        """Have the next ``system`` start NVML again. False: not now, a call is under way."""
        with self._gate:
            idle = self._threads.idle
            self._stale = self._stale or idle
            return idle

    def stop(self) -> None:
        """Stop NVML and its threads. One that hangs is left to end with the process."""
        if not self._gate.acquire(timeout=_STOP_SECONDS):
            log.warning("NVML is not stopped: it is being started")
            return
        try:
            self._functions = None
            self._threads.run_system("stopping NVML", self._shut_down, _STOP_SECONDS)
        except NodeError as error:
            log.warning("NVML is not stopped: %s", error)
        finally:
            self._threads.stop()
            self._gate.release()

    @property
    def geometries(self) -> Geometries:
        """How GPUs can be cut, as was read in this session."""
        return self._listing.geometries

    def glances(
        self, indices: Iterable[int], known: Container[int] = ()
    ) -> Mapping[int, Glance | NodeError]:
        """For each NVML index what can change, or why it could not be read. UnderChange: it is
        *known* from an earlier look, and not now, since a GPU is being changed, or since it is late
        for the first time."""
        listing = self._listing
        if known:
            self._late.looks()
        seen = dict(
            self._each(dict.fromkeys(indices, nvml_readers.glance), "reading its state", known)
        )
        # The driver tells what is cut of one board after the other, so they are late together.
        cut = {
            index: partial(nvml_readers.with_instances, listing.geometries, one)
            for index, one in seen.items()
            if isinstance(one, Glance) and one.mig_on
        }
        seen |= self._each(cut, "reading what is cut of it", known, len(cut))
        with self._gate:
            if listing is self._listing:  # else these may be the indices of other GPUs by now
                for index, one in seen.items():
                    if not isinstance(one, NodeError):
                        listing.seen(index, one)
        return seen

    def facts(self, indices: Iterable[int], known: Container[int] = ()) -> FactsByIndex:
        """Like :meth:`glances`, what stays."""
        read = partial(nvml_readers.facts, self._listing.geometries)
        return self._each(dict.fromkeys(indices, read), "reading its properties", known)

    def links(self, indices: Iterable[int], known: Container[int] = ()) -> LinksByIndex:
        """Like :meth:`glances`, the active NVLinks."""
        return self._each(dict.fromkeys(indices, nvml_readers.links), "reading its NVLinks", known)

    def on_gpu(
        self,
        gpu: GpuUuid,
        doing: str,
        call: Callable[[Functions, Any], T],
        seconds: float | None = None,
    ) -> T:
        """What *call* answers for *gpu*, or a MIG instance of one, on its GPU's thread.

        *seconds*: it is a change, which may take so long; nothing that is read meanwhile is late by
        it, of whichever GPU, since the driver may serve one after another.
        NodeError: also where NVML does not list the GPU. Vanished: it does not list the instance.
        """
        if (pending := self._submit_by_uuid(gpu, doing, call, seconds)) is None:
            self.glances(range(self.system().gpus))
            pending = self._submit_by_uuid(gpu, doing, call, seconds)
        if pending is None:
            raise not_listed(gpu, doing)
        try:
            return pending.result()
        except NodeError as error:
            self._judge(error)
            raise

    def _submit_by_uuid(
        self,
        gpu: GpuUuid,
        doing: str,
        call: Callable[[Functions, Any], T],
        seconds: float | None,
    ) -> Pending[T] | None:
        """None: it is not known where NVML lists *gpu* since it was started."""

        def by_uuid(functions: Functions, handle: Any) -> T:
            return call(functions, functions.nvmlDeviceGetHandleByUUID(gpu))

        with self._gate:
            if (index := self._listing.index(gpu)) is None:
                return None
            threads = self._threads
            submit = threads.read if seconds is None else partial(threads.change, seconds=seconds)
            return self._submit(index, f"{named(gpu)}, {doing}", by_uuid, submit)

    def _each(
        self,
        reads: Mapping[int, Callable[[Functions, Any], T]],
        doing: str,
        known: Container[int],
        boards: int = 0,
    ) -> Mapping[int, T | NodeError]:
        answers: dict[int, T | NodeError] = {}
        pending: dict[int, Pending[T]] = {}
        submit = partial(self._threads.read, boards=boards)
        with self._gate:
            for index, read in reads.items():
                try:
                    if index in known and self._threads.changes.under_way(index):
                        raise UnderChange(f"GPU {index}, {doing}: it is being changed")
                    pending[index] = self._submit(index, doing, read, submit)
                except NodeError as error:
                    answers[index] = self._late.excused(index, error, known)
        behind = self._threads.behind()
        for index, answer in pending.items():
            try:
                if index in known and not answer.wait(behind):
                    raise UnderChange(f"GPU {index}, {doing}: another GPU is being changed")
                answers[index] = answer.result()
            except NodeError as error:
                self._judge(error)
                answers[index] = self._late.excused(index, error, known)
        return dict(sorted(answers.items()))

    def _submit(
        self, index: int, doing: str, read: Callable[[Functions, Any], T], submit: Submit
    ) -> Pending[T]:
        if (functions := self._functions) is None:
            raise NodeError(f"GPU {index}, {doing}: NVML is not running")

        def call() -> T:
            with nvml_errors(doing):
                return read(functions, functions.nvmlDeviceGetHandleByIndex(index))

        return submit(index, doing, call)

    def _start(self) -> None:
        """(Re)start NVML; the gate is held, so this is as long as one deadline at most."""

        def call() -> Functions:
            self._shut_down()
            functions = self._load()
            with nvml_errors("starting NVML"):
                functions.nvmlInit()
            self._initialised = functions
            return functions

        self._functions = None
        self._functions = self._threads.run_system("starting NVML", call)
        self._session += 1
        self._stale = False
        self._listing, self._late = Listing(), Late()
        self._known = None
        log.info("NVML started", extra={"session": self._session})

    def _read_system(self) -> System:
        if (functions := self._functions) is None:
            raise NodeError("reading the driver: NVML is not running")
        with nvml_errors("reading the driver"):
            self._known = found = nvml_readers.system(functions, self._session)
        return found

    def _judge(self, error: NodeError) -> None:
        self._stale = self._stale or code(error) in NEW_SESSION

    def _shut_down(self) -> None:
        """Undo the last nvmlInit, also one that ended when nobody waited for it any more."""
        functions, self._initialised = self._initialised, None
        try:
            if functions is not None:
                functions.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.info("NVML was stopped already: %s", error)  # its driver went before it
