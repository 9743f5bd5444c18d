"""The functions of NVML, which kill whoever calls them when a test says so."""

import threading
from collections.abc import Callable
from typing import Any


class Killed(Exception):
    """The process is gone: nothing that it meant to do any more is done."""


class Mortal:
    """The functions of NVML, until one of the calls, which kills the process. The dead call
    nothing any more, on whichever thread.

    *at*: the number of that call, from 1; 0: it lives. *carried_out*: it dies when that was done.
    """

    def __init__(self, functions: Any, at: int = 0, carried_out: bool = False) -> None:
        self._functions = functions
        self._at = at
        self._carried_out = carried_out
        self._lock = threading.Lock()
        self.calls: list[str] = []  # in order
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if not name.startswith("nvml") or name == "nvmlShutdown":  # the kernel ends that, too
            return function
        return self._mortal(name, function)

    def _mortal(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            dies = self._begin(name)
            if dies and not self._carried_out:
                raise Killed(name)
            answer = function(*args)
            if dies:
                raise Killed(name)
            return answer

        return call

    def _begin(self, name: str) -> bool:
        with self._lock:
            if self.dead:
                raise Killed(name)
            self.calls.append(name)
            self.dead = len(self.calls) == self._at
            return self.dead
