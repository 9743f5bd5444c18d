"""An API server for one process, which is killed or paused at one of its writes."""

import threading
from collections.abc import Callable
from typing import Any

from dra_driver.base.errors import Unreachable
from dra_driver.k8s.api import KubernetesApi

_WRITES = ("create", "update", "patch", "delete")


class MortalApi:
    """Hands requests on until one of the writes, by its number from 1. The dead write nothing any
    more, on whichever thread.

    *carried_out*: it dies when that was done.
    """

    def __init__(self, api: KubernetesApi, at: int, carried_out: bool = False) -> None:
        self._api = api
        self._at = at
        self._carried_out = carried_out
        self._lock = threading.Lock()
        self._writes = 0
        self.dead = threading.Event()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._api, name)
        return self._mortal(function) if name in _WRITES else function

    def _mortal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                is_dead = self.dead.is_set()
                self._writes += 1
                dies = self._writes == self._at
            if is_dead or (dies and not self._carried_out):
                self.dead.set()
                raise Unreachable("the process is dead")
            answer = function(*args, **options)
            if dies:
                self.dead.set()
                raise Unreachable("the process is dead")
            return answer

        return call


class PausedApi:
    """Hands requests on until one of the writes, by its number from 1: that one and those after it
    wait until ``resume``, as in a process that was stopped and goes on."""

    def __init__(self, api: KubernetesApi, at: int) -> None:
        self._api = api
        self._at = at
        self._lock = threading.Lock()
        self._writes = 0
        self._going = threading.Event()
        self.paused = threading.Event()

    def resume(self) -> None:
        self._going.set()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._api, name)
        return self._held(function) if name in _WRITES else function

    def _held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._writes += 1
                waits = self._writes >= self._at
            if waits:
                self.paused.set()
                assert self._going.wait(60.0)
            return function(*args, **options)

        return call
