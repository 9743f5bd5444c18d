"""The one door to NVML: every call has a deadline, every error is a NodeError.

What was read of GPUs holds until NVML is started again. A GPU that does not answer in time once may
wait for the driver's work on another GPU: it is unavailable from the second time on.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import MigInstanceNotFound, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid, is_mig_uuid
from dra_driver.node.nvml import readers
from dra_driver.node.nvml.api import RESTART_NEEDED, MigReader, NvmlFunctions, nvml_error_code
from dra_driver.node.nvml.library import nvml_errors
from dra_driver.node.nvml.session import NvmlSession, OpenNvml
from dra_driver.node.nvml.threads import GpuBeingChanged, NvmlThreads, PendingCall, SubmitToGpu
from dra_driver.node.nvml.values import DynamicState, NvLinks, NvmlSystem, StaticInfo

log = logging.getLogger(__name__)


T = TypeVar("T")

_GpuCall = Callable[[NvmlFunctions, Any], T]
"""Asks the GPU whose handle it is given."""
_Read = Callable[[NvmlFunctions], T]
"""Asks a GPU that it knows."""

_STOP_SECONDS: Final = 1.0
_IDLE_POLL_SECONDS: Final = 0.02
# Who waits in NVML for events leaves it within two seconds; a process that ends does not wait so
# long, as its end closes NVML, too.
_LEAVE_SECONDS: Final = 3.0
_LEAVE_AT_STOP_SECONDS: Final = 0.2
_LEAVE_AGAIN_SECONDS: Final = 30.0  # everybody waits meanwhile
_READING_STATE: Final = "reading its state"


class Nvml:
    """NVML on a thread for the system and one for each GPU, so a hung GPU stops only itself.

    ``load`` gives the functions (``load_nvml`` or a simulation) each time NVML is started. NVML
    lists the GPUs that there are when it is started: ``restart`` finds those that came later.
    ``start_mig`` gives the reader of partitions for each such session.
    """

    def __init__(
        self,
        load: Callable[[], NvmlFunctions],
        start_mig: Callable[[], MigReader],
        deadline_seconds: float = 5.0,
    ) -> None:
        self._load = load
        self._start_mig = start_mig
        self._functions: NvmlFunctions | None = None
        self._initialised: NvmlFunctions | None = None  # belongs to the system's thread
        self._session_number = 0
        self._stale = False
        self._leave_again_at = 0.0
        self._released = ""  # why; empty: it is not
        self._deadline_seconds = deadline_seconds
        self._threads = NvmlThreads(deadline_seconds)
        self._session = NvmlSession(start_mig())
        self._gate = threading.Lock()  # nothing is submitted while NVML is stopped and started
        self.open: Final = OpenNvml()

    def system(self) -> NvmlSystem:
        """Driver and number of GPUs; starts NVML if need be. NodeError: the driver is not ready."""
        with self._gate:
            if self._released:
                raise NodeError(self._not_running("reading the driver"))
            if self._functions is None:
                self._close()
                self._start()
            elif self._stale and self._threads.idle and self._is_left():
                self._start()
            known_system = self._session.system
            pending = self._threads.read_system("reading the driver", self._read_system)
        try:
            if known_system and not pending.wait(self._threads.give_up()):
                return known_system
            return pending.result()
        except NodeError as error:
            self._note_error(error)
            raise

    def restart(self) -> bool:
        """Have the next ``system`` start NVML again. False: not now, a call is under way."""
        with self._gate:
            idle = self._threads.idle
            self._stale = self._stale or idle
            return idle

    @property
    def released(self) -> str:
        """Why NVML is closed until ``resume``; empty: it is not."""
        return self._released

    def release(self, why: str) -> None:
        """Close NVML, so that this process has no GPU open, until ``resume``; every call is a
        NodeError that says *why*. Doing it twice is doing it once.

        TimedOut: a call has not returned yet. None is begun any more; do it again.
        """
        with self._gate:
            self._released = why
            deadline = Deadline(self._deadline_seconds)
            while not self._threads.idle:
                if deadline.expired:
                    raise TimedOut(f"releasing NVML: a call is under way ({why})")
                time.sleep(_IDLE_POLL_SECONDS)
            self._close()
            self._functions = None
            self._threads.run_system("releasing NVML", self._shut_down)
        log.info("NVML is released", extra={"reason": why})

    def resume(self) -> None:
        """Have the next ``system`` start NVML after ``release``."""
        with self._gate:
            if not self._released:
                return
            log.info("NVML is used again", extra={"reason": self._released})
            self._released = ""
            self._stale = True  # also where it could not be closed

    def stop(self) -> None:
        """Stop NVML and its threads. One that hangs is left to end with the process."""
        if not self._gate.acquire(timeout=_STOP_SECONDS):
            log.warning("NVML is not stopped: it is being started")
            return
        try:
            self._functions = None
            if self.open.close(_LEAVE_AT_STOP_SECONDS):
                self._threads.run_system("stopping NVML", self._shut_down, _STOP_SECONDS)
            else:
                self._threads.read_system("stopping NVML", self._shut_down_once_left)
        except NodeError as error:
            log.warning("NVML is not stopped: %s", error)
        finally:
            self._threads.stop()
            self._gate.release()

    def dynamic_states(
        self, indices: Iterable[int], known: Container[int] = ()
    ) -> Mapping[int, DynamicState | NodeError]:
        """For each NVML index what can change, or why it could not be read. GpuBeingChanged: it is
        *known* from an earlier scan, and not now, since a GPU is being changed, or since it is late
        for the first time."""
        session = self._session
        if known:
            session.begin_read()
        reads = _at_indices(indices, readers.read_dynamic_state)
        quick = {index: read for index, read in reads.items() if index in known}
        states: dict[int, DynamicState | NodeError] = dict(
            self._read_together(quick, _READING_STATE)
        )
        alone = {index: read for index, read in reads.items() if index not in states}
        # Without persistence mode the driver starts a GPU when it is opened, and may start one
        # after the other; a second for each is an estimate.
        new = sum(index not in known and not session.has_answered(index) for index in alone)
        states |= self._read_gpus(alone, _READING_STATE, known, new)
        # The driver lists partitions of one board after the other, so they are late together.
        partitioned = {
            index: _at_index(index, partial(readers.with_mig_instances, session.mig, state))
            for index, state in states.items()
            if isinstance(state, DynamicState) and state.mig_on
        }
        states |= self._read_gpus(partitioned, "reading its partitions", known, len(partitioned))
        with self._gate:
            if session is self._session:  # else these may be the indices of other GPUs by now
                for index, state in states.items():
                    if not isinstance(state, NodeError):
                        session.update(index, state)
        return states

    def static_infos(
        self, indices: Iterable[int], known: Container[int] = ()
    ) -> Mapping[int, StaticInfo | NodeError]:
        """Like :meth:`dynamic_states`, what stays the same."""
        read = partial(readers.read_static_info, self._session.mig)
        return self._read_gpus(_at_indices(indices, read), "reading its properties", known)

    def links(
        self, indices: Iterable[int], known: Container[int] = ()
    ) -> Mapping[int, NvLinks | NodeError]:
        """Like :meth:`dynamic_states`, the active NVLinks."""
        reads = _at_indices(indices, readers.read_nvlinks)
        return self._read_gpus(reads, "reading its NVLinks", known)

    def on_gpu(
        self,
        gpu: GpuUuid,
        action: str,
        call: _GpuCall[T],
        seconds: float | None = None,
    ) -> T:
        """What *call* answers for *gpu*, or a MIG instance of one, on its GPU's thread.

        *seconds*: it is a change, which may take so long; it makes no reading late
        meanwhile, of any GPU, since the driver may serve one after another.
        NodeError: also where NVML does not list the GPU. MigInstanceNotFound: it does not list the
        instance.
        """
        return self._answer(self._ask(gpu, action, call, seconds))

    def on_gpus(
        self, gpus: Iterable[GpuUuid], action: str, call: _GpuCall[T]
    ) -> Mapping[GpuUuid, T | NodeError]:
        """Like :meth:`on_gpu` for each of *gpus*, together. *call* only reads: where a GPU is late,
        it and those after it are asked twice."""
        gpus = tuple(gpus)
        with self._gate:
            listed = {index: gpu for gpu in gpus if (index := self._session.index(gpu)) is not None}
        reads = {index: _by_uuid(gpu, call) for index, gpu in listed.items()}
        together = self._read_together(reads, action)
        answers: dict[GpuUuid, T | NodeError] = {listed[i]: read for i, read in together.items()}
        pending: dict[GpuUuid, PendingCall[T]] = {}
        for gpu in gpus:
            if gpu in answers:
                continue
            try:
                pending[gpu] = self._ask(gpu, action, call)
            except NodeError as error:
                answers[gpu] = error
        for gpu, asked in pending.items():
            try:
                answers[gpu] = self._answer(asked)
            except NodeError as error:
                answers[gpu] = error
        return answers

    def _ask(
        self,
        gpu: GpuUuid,
        action: str,
        call: _GpuCall[T],
        seconds: float | None = None,
    ) -> PendingCall[T]:
        if (pending := self._submit_by_uuid(gpu, action, call, seconds)) is None:
            self.dynamic_states(range(self.system().gpus))
            pending = self._submit_by_uuid(gpu, action, call, seconds)
        if pending is None:
            error_type = MigInstanceNotFound if is_mig_uuid(gpu) else NodeError
            raise error_type(f"{_described(gpu)}, {action}: NVML does not list it")
        return pending

    def _answer(self, pending: PendingCall[T]) -> T:
        try:
            return pending.result()
        except NodeError as error:
            self._note_error(error)
            raise

    def _submit_by_uuid(
        self,
        gpu: GpuUuid,
        action: str,
        call: _GpuCall[T],
        seconds: float | None,
    ) -> PendingCall[T] | None:
        """None: it is not known where NVML lists *gpu* since it was started."""
        with self._gate:
            if (index := self._session.index(gpu)) is None:
                return None
            threads = self._threads
            submit = threads.read if seconds is None else partial(threads.change, seconds=seconds)
            return self._submit(index, f"{_described(gpu)}, {action}", _by_uuid(gpu, call), submit)

    def _read_together(self, reads: Mapping[int, _Read[T]], action: str) -> Mapping[int, T]:
        """What the GPUs at these indices answer at once, read on one thread; the others are to be
        read each on its own."""
        answers: dict[int, T] = {}
        threads = self._threads
        with suppress(TimedOut):
            with self._gate:
                session, functions = self._session, self._usable
                quick = {
                    index: read
                    for index, read in reads.items()
                    if threads.is_free(index) and not session.was_late(index)
                }
                if functions is None or len(quick) < 2 or threads.changes.under_way():
                    return answers
                read_all = partial(_read_in_turn, functions, quick, action, answers)
                pending = threads.read_together(action, read_all)
            if pending.wait(threads.give_up()):
                pending.result()
        return dict(answers)

    def _read_gpus(
        self,
        reads: Mapping[int, _Read[T]],
        action: str,
        known: Container[int],
        boards: int = 0,
    ) -> Mapping[int, T | NodeError]:
        answers: dict[int, T | NodeError] = {}
        pending: dict[int, PendingCall[T]] = {}
        submit = partial(self._threads.read, boards=boards)
        with self._gate:
            for index, read in reads.items():
                try:
                    if index in known and self._threads.changes.under_way(index):
                        raise GpuBeingChanged(f"GPU {index}, {action}: it is being changed")
                    pending[index] = self._submit(index, action, read, submit)
                except NodeError as error:
                    answers[index] = self._session.excuse(index, error, known)
        give_up = self._threads.give_up()
        for index, answer in pending.items():
            try:
                if index in known and not answer.wait(give_up):
                    raise GpuBeingChanged(f"GPU {index}, {action}: another GPU is being changed")
                answers[index] = answer.result()
            except NodeError as error:
                self._note_error(error)
                answers[index] = self._session.excuse(index, error, known)
        return dict(sorted(answers.items()))

    def _submit(
        self, index: int, action: str, read: _Read[T], submit: SubmitToGpu
    ) -> PendingCall[T]:
        if (functions := self._usable) is None:
            raise NodeError(self._not_running(f"GPU {index}, {action}"))

        def call() -> T:
            with nvml_errors(action):
                return read(functions)

        return submit(index, action, call)

    @property
    def _usable(self) -> NvmlFunctions | None:
        """None: NVML is closed, or about to be as soon as the calls under way have returned."""
        return None if self._released else self._functions

    def _start(self) -> None:
        """(Re)start NVML, which nobody waits in; the gate is held, so this is as long as one
        deadline at most."""

        def call() -> NvmlFunctions:
            self._shut_down()
            functions = self._load()
            with nvml_errors("starting NVML"):
                functions.nvmlInit()
            self._initialised = functions
            return functions

        self._functions = None
        self._functions = self._threads.run_system("starting NVML", call)
        self._session_number += 1
        self._stale = False
        self._session = NvmlSession(self._start_mig())
        self.open.open(self._functions)
        log.info("NVML started", extra={"session": self._session_number})

    def _close(self) -> None:
        """Before NVML is shut down, nobody may wait in it any more."""
        if not self.open.close(_LEAVE_SECONDS):
            raise TimedOut("closing NVML: a wait for events has not returned")

    def _is_left(self) -> bool:
        """Whether NVML can be started again: nobody waits in it. A registration for events that
        hangs is no reason to use none of the GPUs: what was started is used on, and it is tried
        again later."""
        if self._functions is None or time.monotonic() < self._leave_again_at:
            return False
        if self.open.close(_LEAVE_SECONDS):
            return True
        self.open.open(self._functions)
        self._leave_again_at = time.monotonic() + _LEAVE_AGAIN_SECONDS
        log.warning("NVML is not started again yet: a registration for events has not returned")
        return False

    def _not_running(self, action: str) -> str:
        why = f"is released: {self._released}" if self._released else "is not running"
        return f"{action}: NVML {why}"

    def _read_system(self) -> NvmlSystem:
        if (functions := self._functions) is None:
            raise NodeError(self._not_running("reading the driver"))
        with nvml_errors("reading the driver"):
            system = readers.read_system(functions, self._session_number)
        self._session.system = system
        return system

    def _note_error(self, error: NodeError) -> None:
        self._stale = self._stale or nvml_error_code(error) in RESTART_NEEDED

    def _shut_down_once_left(self) -> None:
        """Unless the process ends before: nothing waits for this."""
        if self.open.close(_LEAVE_SECONDS):
            self._shut_down()

    def _shut_down(self) -> None:
        """Undo the last nvmlInit, also one that ended when nobody waited for it any more."""
        functions, self._initialised = self._initialised, None
        try:
            with nvml_errors("stopping NVML"):
                if functions is not None:
                    functions.nvmlShutdown()
        except NodeError as error:
            log.info("NVML was stopped already: %s", error)  # its driver went before it


def _by_uuid(gpu: GpuUuid, call: _GpuCall[T]) -> _Read[T]:
    """*call* with the handle of *gpu*, which may be a MIG instance."""
    return lambda functions: call(functions, functions.nvmlDeviceGetHandleByUUID(gpu))


def _at_index(index: int, call: _GpuCall[T]) -> _Read[T]:
    """*call* with the handle of the GPU at *index*."""
    return lambda functions: call(functions, functions.nvmlDeviceGetHandleByIndex(index))


def _at_indices(indices: Iterable[int], call: _GpuCall[T]) -> Mapping[int, _Read[T]]:
    """The same for each of *indices*."""
    return {index: _at_index(index, call) for index in indices}


def _read_in_turn(
    functions: NvmlFunctions, reads: Mapping[int, _Read[T]], action: str, answers: dict[int, T]
) -> None:
    """Into *answers*, one after the other; without those that cannot be read."""
    for index, read in reads.items():
        with suppress(NodeError), nvml_errors(action):  # who asks for it alone is told why
            answers[index] = read(functions)


def _described(gpu: GpuUuid) -> str:
    """How a GPU, or an instance of one, is called in messages."""
    return gpu if is_mig_uuid(gpu) else f"GPU {gpu}"
