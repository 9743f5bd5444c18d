"""The door to kubectl and helm: every call is bounded, and their errors become ours."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hack.demonstration.errors import DemoError

CALL_SECONDS = 30

Document = dict[str, Any]


class Kubectl:
    """kubectl, as the administrator of one cluster."""

    def __init__(self, program: Path, kubeconfig: Path, cache: Path) -> None:
        self._program = program
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "KUBECACHEDIR": str(cache),
            "NO_PROXY": "127.0.0.1",
        }

    def run(self, *arguments: str, text: str = "", seconds: float = CALL_SECONDS) -> str:
        """What it prints; *text* is its standard input."""
        return call([str(self._program), *arguments], self._environment, text, seconds)

    def get(self, *arguments: str) -> Document:
        """An object, or a list of them."""
        document: Document = json.loads(self.run("get", *arguments, "--output=json"))
        return document

    def apply(self, text: str) -> None:
        self.run("apply", "--filename=-", text=text)

    def delete(self, paths: Iterable[Path], seconds: float) -> None:
        """Delete what is in files and wait until it is gone; gone already is success."""
        files = [f"--filename={path}" for path in paths]
        wait = ["--ignore-not-found", f"--timeout={seconds:.0f}s"]
        self.run("delete", *files, *wait, seconds=seconds + CALL_SECONDS)


def call(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    text: str = "",
    seconds: float = CALL_SECONDS,
) -> str:
    """What a command prints. DemoError: it failed, or took too long."""
    name = f"`{Path(command[0]).name} {' '.join(command[1:])}`"
    try:
        answer = subprocess.run(
            command,
            env=environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise DemoError(f"{name} did not answer within {seconds:g} s") from e
    except OSError as e:
        raise DemoError(f"{name} cannot be started: {e}") from e
    if answer.returncode != 0:
        raise DemoError(f"{name} failed:\n{answer.stderr.strip()}")
    return answer.stdout
