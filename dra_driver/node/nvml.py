"""The one door to NVML: every call bounded, every error ours."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from dra_driver.errors import NodeError
from dra_driver.model.uuids import GpuUuid
from dra_driver.node import nvml_readers
from dra_driver.node.nvlink import Links
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_listing import Listing, named, not_listed
from dra_driver.node.nvml_values import Facts, Glance, System
from dra_driver.node.versions import cuda_version, driver_version
from dra_driver.node.worker import Pending, Worker

log = logging.getLogger(__name__)
T = TypeVar("T")

_MENDS: Final[Mapping[int, str]] = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the NVIDIA kernel driver; nvidia-smi has to work",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, or point to its driver root",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was changed in use: reboot the node",
    pynvml.NVML_ERROR_GPU_IS_LOST: "it fell off the bus: drain and reboot the node",
    pynvml.NVML_ERROR_RESET_REQUIRED: "once nothing uses it: nvidia-smi --gpu-reset -i ...",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "check its power cables",
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: "its infoROM is damaged: replace the board",
    pynvml.NVML_ERROR_NO_PERMISSION: "run this as root with access to the device nodes",
}
# After these, nothing that NVML said before holds: start it again.
_NEW_SESSION: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)


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
        self._deadline_seconds = deadline_seconds
        self._functions: Functions | None = None
        self._initialised: Functions | None = None  # belongs to the system's thread
        self._session = 0
        self._stale = False
        self._system = Worker("nvml-system")
        self._workers: list[Worker] = []
        self._listing = Listing()  # of this session
        self._gate = threading.Lock()  # nothing is submitted while NVML is stopped and started

    def system(self) -> System:
        """Driver and number of GPUs; starts NVML if need be. NodeError: the driver is not ready."""
        with self._gate:
            if self._functions is None or (self._stale and self._all_idle()):
                self._start()
            pending = self._system.submit(
                "reading the driver", self._read_system, self._deadline_seconds
            )
        try:
            return pending.result()
        except NodeError as error:
            self._judge(error)
            raise

    def restart(self) -> bool:
        """Have the next ``system`` start NVML again. False: not now, a call is under way."""
        with self._gate:
            idle = self._all_idle()
            self._stale = self._stale or idle
            return idle

    def stop(self) -> None:
        """Stop NVML and its threads. One that hangs is left to end with the process."""
        if not self._gate.acquire(timeout=_STOP_SECONDS):
            log.warning("NVML is not stopped: it is being started")
            return
        try:
            self._functions = None
            self._system.submit("stopping NVML", self._shut_down, _STOP_SECONDS).result()
        except NodeError as error:
            log.warning("NVML is not stopped: %s", error)
        finally:
            for worker in (self._system, *self._workers):
                worker.stop()
            self._system, self._workers = Worker("nvml-system"), []
            self._gate.release()

    def glances(self, indices: Iterable[int]) -> Mapping[int, Glance | NodeError]:
        """For each NVML index what can change, or why it could not be read."""
        listing = self._listing

        def read(functions: Functions, handle: Any) -> Glance:
            return nvml_readers.glance(functions, handle, listing.geometries)

        seen = self._each(indices, "reading its state", read)
        with self._gate:
            if listing is self._listing:  # else these may be the indices of other GPUs by now
                for index, one in seen.items():
                    if not isinstance(one, NodeError):
                        listing.seen(index, one)
        return seen

    def facts(self, indices: Iterable[int]) -> Mapping[int, Facts | NodeError]:
        """For each NVML index what stays, or why it could not be read."""
        listing = self._listing

        def read(functions: Functions, handle: Any) -> Facts:
            return nvml_readers.facts(functions, handle, listing.geometries)

        return self._each(indices, "reading its properties", read)

    def links(self, indices: Iterable[int]) -> Mapping[int, Links | NodeError]:
        """For each NVML index its active NVLinks, or why they could not be read."""
        return self._each(indices, "reading its NVLinks", nvml_readers.links)

    def on_gpu(
        self,
        gpu: GpuUuid,
        doing: str,
        call: Callable[[Functions, Any], T],
        seconds: float | None = None,
    ) -> T:
        """What *call* answers for *gpu*, or a MIG instance of one, on its GPU's thread.

        It has *seconds*, where it takes longer than reading; what is read meanwhile waits for it.
        NodeError: also where NVML does not list the GPU. Vanished: it does not list the instance.
        """
        pending = self._submit_by_uuid(gpu, doing, call, seconds)
        if pending is None:
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
            pending = self._submit(index, f"{named(gpu)}, {doing}", by_uuid, seconds)
            if seconds is not None:
                self._listing.changes(index, pending)
            return pending

    def _each(
        self, indices: Iterable[int], doing: str, read: Callable[[Functions, Any], T]
    ) -> Mapping[int, T | NodeError]:
        answers: dict[int, T | NodeError] = {}
        pending: dict[int, Pending[T]] = {}
        with self._gate:
            for index in indices:
                try:
                    pending[index] = self._submit(index, doing, read)
                except NodeError as error:
                    answers[index] = error
        for index, answer in pending.items():
            try:
                answers[index] = answer.result()
            except NodeError as error:
                self._judge(error)
                answers[index] = error
        return dict(sorted(answers.items()))

    def _submit(
        self,
        index: int,
        doing: str,
        read: Callable[[Functions, Any], T],
        seconds: float | None = None,
    ) -> Pending[T]:
        functions = self._functions
        if functions is None:
            raise NodeError(f"GPU {index}, {doing}: NVML is not running")
        while len(self._workers) <= index:
            self._workers.append(Worker(f"nvml-gpu-{len(self._workers)}"))

        def call() -> T:
            with nvml_errors(doing):
                return read(functions, functions.nvmlDeviceGetHandleByIndex(index))

        if seconds is None:
            seconds = self._deadline_seconds + self._listing.busy_seconds(index)
        return self._workers[index].submit(doing, call, seconds)

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
        self._functions = self._system.submit(
            "starting NVML", call, self._deadline_seconds
        ).result()
        self._session += 1
        self._stale = False
        self._listing = Listing()
        log.info("NVML started", extra={"session": self._session})

    def _read_system(self) -> System:
        functions = self._functions
        if functions is None:
            raise NodeError("reading the driver: NVML is not running")
        with nvml_errors("reading the driver"):
            return System(
                session=self._session,
                driver_version=driver_version(functions.nvmlSystemGetDriverVersion()),
                cuda_driver_version=cuda_version(functions.nvmlSystemGetCudaDriverVersion_v2()),
                gpus=functions.nvmlDeviceGetCount(),
            )

    def _all_idle(self) -> bool:
        return all(worker.idle for worker in (self._system, *self._workers))

    def _judge(self, error: NodeError) -> None:
        cause = error.__cause__
        if isinstance(cause, pynvml.NVMLError) and cause.value in _NEW_SESSION:
            self._stale = True

    def _shut_down(self) -> None:
        """Undo the last nvmlInit, also one that ended when nobody waited for it any more."""
        functions, self._initialised = self._initialised, None
        if functions is None:
            return
        try:
            functions.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.info("NVML was stopped already: %s", error)  # its driver went before it
