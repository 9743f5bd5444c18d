"""Runs a program while a node has let go of GPUs."""

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from dra_driver.base.errors import DriverError, SettingsError

log = logging.getLogger(__name__)

_TUNING: Final = (
    ("MALLOC_ARENA_MAX", "1"),
    ("PYTHONOPTIMIZE", "2"),
    ("PYDANTIC_DISABLE_PLUGINS", "__all__"),
)
_AGAIN_SECONDS: Final = 5.0  # until a release that could not be prolonged is tried again


def run_while_released(program: Sequence[str], go_on: Callable[[], None], seconds: float) -> int:
    """Its exit code. However long it takes: *go_on* is called every so many *seconds*, and sooner
    after it failed; the program is not left alone for that.

    SettingsError: it cannot be started.
    """
    try:
        process = subprocess.Popen(program, env=_environment())
    except OSError as e:
        raise SettingsError(f"{program[0]} cannot be started: {e.strerror}") from e
    wait_seconds = seconds
    while True:
        try:
            code = process.wait(wait_seconds)
            return code if code >= 0 else 128 - code  # of a signal, as shells have it
        except subprocess.TimeoutExpired:
            pass
        try:
            go_on()
            wait_seconds = seconds
        except DriverError as e:
            log.warning("the release is not prolonged yet: %s", e)
            wait_seconds = min(seconds, _AGAIN_SECONDS)


def _environment() -> dict[str, str]:
    """Ours, but for what the image sets to have the driver take less memory and time: a program in
    Python may need its docstrings, assertions and plugins, and one with many threads more than one
    heap."""
    return {name: value for name, value in os.environ.items() if (name, value) not in _TUNING}
