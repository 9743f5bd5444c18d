"""Runs a program while a node has let go of GPUs."""

import subprocess
from collections.abc import Callable, Sequence

from dra_driver.base.errors import SettingsError


def run_while_released(program: Sequence[str], go_on: Callable[[], None], seconds: float) -> int:
    """Its exit code. However long it takes: *go_on* is called every so many *seconds*.

    SettingsError: it cannot be started.
    """
    try:
        process = subprocess.Popen(program)
    except OSError as e:
        raise SettingsError(f"{program[0]} cannot be started: {e.strerror}") from e
    while True:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            go_on()
