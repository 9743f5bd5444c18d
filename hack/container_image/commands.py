"""The programs of this machine that the image is made with."""

import subprocess
from collections.abc import Mapping, Sequence

from hack.container_image.errors import ImageError

COMMAND_SECONDS = 300
_LAST_LINES = 15


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    needs: str = "",
    timeout_seconds: float = COMMAND_SECONDS,
) -> bytes:
    """What it writes to standard output.

    ImageError: it failed, with its last lines; or it is not here, and *needs* says what brings it.
    """
    line = " ".join(command)
    try:
        answer = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError as e:
        raise ImageError(f"{command[0]} is not on this machine: {needs or 'install it'}") from e
    except subprocess.TimeoutExpired as e:
        raise ImageError(f"still running after {timeout_seconds:g} s: {line}") from e
    if answer.returncode != 0:
        output = (answer.stdout + answer.stderr).decode(errors="replace")
        raise ImageError(f"{line} failed:\n" + "\n".join(output.splitlines()[-_LAST_LINES:]))
    return answer.stdout
