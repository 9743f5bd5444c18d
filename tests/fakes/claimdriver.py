"""A driver of imaginary devices, and a plugin that serves it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dra_driver.base.errors import DriverError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.kubeletplugin.serve.plugin import KubeletPlugin, PluginTimeouts
from dra_driver.kubeletplugin.serve.services import DraService
from dra_driver.kubeletplugin.serve.sockets import socket_paths

DRIVER = "gpu.example.com"
DEFAULT_TIMES = PluginTimeouts()


def ref(name: str, uid: str | None = None) -> ClaimRef:
    return ClaimRef("default", name, ClaimUid(uid or f"uid-{name}"))


def device(ref: ClaimRef) -> PreparedDevice:
    return PreparedDevice(("gpu",), "node-a", "gpu-0", (f"example.com/claim={ref.uid}",))


class Desk:
    """A driver that prepares one device per claim. *tell* may wait or raise, per claim."""

    def __init__(self, tell: Callable[[str, ClaimRef], None] = lambda operation, ref: None) -> None:
        self.calls: list[tuple[str, str]] = []  # (operation, claim name)
        self.at_once: dict[str, int] = {}  # the most calls side by side for a claim UID
        self._tell = tell
        self._now: dict[str, int] = {}
        self._guard = threading.Lock()

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        with self._counted("prepare", ref):
            return [device(ref)]

    def unprepare(self, ref: ClaimRef) -> None:
        with self._counted("unprepare", ref):
            pass

    @contextlib.contextmanager
    def _counted(self, operation: str, ref: ClaimRef) -> Iterator[None]:
        with self._guard:
            self.calls.append((operation, ref.name))
            self._now[ref.uid] = self._now.get(ref.uid, 0) + 1
            self.at_once[ref.uid] = max(self._now[ref.uid], self.at_once.get(ref.uid, 0))
        try:
            self._tell(operation, ref)
            yield
        finally:
            with self._guard:
                self._now[ref.uid] -= 1


class Gate:
    """Where calls wait: *begun* once the first is there, until *go* is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, operation: str, ref: ClaimRef) -> None:
        self.begun.set()
        assert self.go.wait(60)


class Counted:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, str]] = []

    def observe(self, operation: str, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes.append((operation, outcome))


class Running:
    """A plugin in this process, its sockets below *directory*."""

    def __init__(
        self,
        directory: Path,
        service: DraService,
        pod_uid: str | None = None,
        times: PluginTimeouts = DEFAULT_TIMES,
        on_round: Callable[[], bool] = lambda: False,
        driver: str = DRIVER,
    ) -> None:
        self.paths = socket_paths(
            driver, directory / "plugins" / driver, directory / "plugins_registry", pod_uid
        )
        self.fatal: list[DriverError] = []
        self.died = threading.Event()
        self.plugin = KubeletPlugin(self.paths, service, self._die, on_round, times)

    def __enter__(self) -> "Running":
        self.plugin.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plugin.stop()

    def _die(self, error: DriverError) -> None:
        self.fatal.append(error)
        self.died.set()


def running(
    directory: Path,
    desk: Desk | None = None,
    pod_uid: str | None = None,
    on_round: Callable[[], bool] = lambda: False,
    **times: float,
) -> Running:
    service = DraService(desk or Desk(), Counted())
    return Running(directory, service, pod_uid, PluginTimeouts(**times), on_round)
