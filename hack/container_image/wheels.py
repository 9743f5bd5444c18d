"""The wheels of the image: those of the lock file, for each architecture, and our own."""

import hashlib
import os
import sys
from pathlib import Path

from hack.container_image.commands import run
from hack.testbed.cache import Progress, cache_dir, made

# What nothing of ours imports: the asynchronous Kubernetes client, and what only that needs.
LEFT_OUT = frozenset(
    {
        "aiohappyeyeballs",
        "aiohttp",
        "aiohttp-retry",
        "aiosignal",
        "attrs",
        "frozenlist",
        "multidict",
        "propcache",
        "yarl",
    }
)
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_GLIBC_MINORS = range(36, 4, -1)  # of the image's C library, 2.36, and of older ones
_EPOCH = "315532800"  # 1980, the first date that a zip file can hold


def locked(lock: Path, architecture: str, progress: Progress) -> list[Path]:
    """The wheels of the lock file, less LEFT_OUT; each was held against its hashes there."""
    key = hashlib.sha256(lock.read_bytes()).hexdigest()

    def download(directory: Path) -> None:
        progress(f"getting the wheels for {architecture}")
        machine = _MACHINES[architecture]
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
        names = [*platforms, f"manylinux2014_{machine}"]
        options = [word for name in names for word in ("--platform", name)]
        options += ["--implementation", "cp", "--python-version", "3.11"]
        options += [word for abi in ("cp311", "abi3", "none") for word in ("--abi", abi)]
        only = ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
        run(
            [
                *_PIP,
                "download",
                *only,
                *options,
                "--dest",
                str(directory),
                "--requirement",
                str(lock),
            ]
        )

    directory = made(cache_dir() / f"wheels-{architecture}-{key}", download, progress)
    wheels = sorted(directory.glob("*.whl"))
    return [wheel for wheel in wheels if distribution(wheel) not in LEFT_OUT]


def own(repository: Path, directory: Path) -> Path:
    """The driver's wheel, built into *directory* from the working tree."""
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(directory)]
    run(
        [*_PIP, "wheel", *options, str(repository)], env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
    )
    [wheel] = directory.glob("*.whl")
    return wheel


def distribution(wheel: Path) -> str:
    """The normalized name of a wheel's project.

    >>> distribution(Path("aiohttp_retry-2.9.1-py3-none-any.whl"))
    'aiohttp-retry'
    """
    return wheel.name.partition("-")[0].replace("_", "-").lower()


def version(wheel: Path) -> str:
    """
    >>> version(Path("aiohttp_retry-2.9.1-py3-none-any.whl"))
    '2.9.1'
    """
    return wheel.name.split("-")[1]
