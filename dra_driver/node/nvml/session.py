"""What holds from one start of NVML to the next, and who keeps it from being shut down."""

import logging
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.node.nvml.api import MigReader, NvmlFunctions
from dra_driver.node.nvml.threads import GpuBeingChanged
from dra_driver.node.nvml.values import DynamicState, NvmlSystem

log = logging.getLogger(__name__)


class NvmlSession:
    """What is known since NVML was started: the driver, where NVML lists GPUs and MIG instances,
    and which GPUs were late, by index, at the last scan and at this one."""

    def __init__(self, mig: MigReader) -> None:
        self.mig = mig
        self.system: NvmlSystem | None = None
        self._indices: dict[GpuUuid, int] = {}
        self._late_before: set[int] = set()
        self._late_now: set[int] = set()

    def index(self, uuid: GpuUuid) -> int | None:
        """Where NVML lists this GPU, or the GPU of this instance. NVML's gate is held."""
        return self._indices.get(uuid)

    def has_answered(self, index: int) -> bool:
        """Whether the GPU at *index* was read since NVML was started."""
        return index in self._indices.values()

    def update(self, index: int, state: DynamicState) -> None:
        """The GPU at *index*, and its instances, are what *state* says. NVML's gate is held."""
        others = {uuid: place for uuid, place in self._indices.items() if place != index}
        instances = {instance.uuid: index for instance in state.instances}
        self._indices = others | {state.uuid: index} | instances

    def begin_read(self) -> None:
        """Another scan begins. A GPU that was in time at the last one is no longer late."""
        self._late_before, self._late_now = self._late_now, set()

    def was_late(self, index: int) -> bool:
        """Whether the GPU was late at the last scan."""
        return index in self._late_before

    def excuse(self, index: int, error: NodeError, known: Container[int]) -> NodeError:
        """*error*, unless this is the first scan at which a GPU of *known* is late: then what is
        known of it holds until the next one."""
        late = isinstance(error, TimedOut)
        if index not in known or not (late or isinstance(error, GpuBeingChanged)):
            return error
        if index in self._late_before:  # one that is not asked, since it is changed, is not in time
            self._late_now.add(index)
            return error
        if not late:
            return error
        if index not in self._late_now:
            log.warning("a GPU is late, and is what it was at the last scan: %s", error)
        self._late_now.add(index)
        return GpuBeingChanged(f"{error}; it is late for the first time")


class OpenNvml:
    """NVML while it is started, for a thread that waits in it for long: NVML must not be shut down
    before that thread has left it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._functions: NvmlFunctions | None = None
        self._users = 0

    @property
    def is_open(self) -> bool:
        """Whether it can be used; who uses it has to leave otherwise."""
        return self._functions is not None

    def open(self, functions: NvmlFunctions) -> None:
        """NVML was started."""
        with self._changed:
            self._functions = functions
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Have those leave who use it. False: not all did in time; nobody new can enter."""
        with self._changed:
            self._functions = None
            return self._changed.wait_for(lambda: self._users == 0, seconds)

    @contextmanager
    def use(self, seconds: float) -> Iterator[NvmlFunctions | None]:
        """Keep NVML started inside. None: it was not started within *seconds*."""
        with self._changed:
            self._changed.wait_for(lambda: self._functions is not None, seconds)
            functions = self._functions
            self._users += functions is not None
        try:
            yield functions
        finally:
            with self._changed:
                self._users -= functions is not None
                self._changed.notify_all()
