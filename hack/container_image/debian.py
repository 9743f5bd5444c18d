"""The Debian packages of the image: deploy/debian.lock pins them, apt's own downloader gets them.

The lock file names files in a mirror, never the mirror: that is one of this machine's own apt
sources.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from hack.container_image.commands import run
from hack.container_image.errors import ImageError
from hack.testbed.cache import Progress, cache_dir, made

ARCHITECTURES = ("amd64", "arm64")
PACKAGES = (
    "base-files",  # /etc/os-release, the texts of common licences
    "coreutils",  # chroot, in which the driver runs programs of the host
    "gcc-12-base",  # the licence of libgcc-s1 and libstdc++6
    "libc6",
    "libexpat1",
    "libffi8",  # ctypes, with which NVML is called
    "libgcc-s1",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libssl3",
    "libstdc++6",  # gRPC and protobuf
    "python3.11-minimal",
    "zlib1g",
)
NEEDS = (
    "the image is built from Debian packages, which takes Debian 12 (or a container of it, as "
    "docs/install.md shows)"
)

_APT_HELPER = "/usr/lib/apt/apt-helper"
_HEADER = """\
# The Debian packages of the image, pinned. hack/update-image writes this file anew.
# architecture  package  version  SHA-256  path in a mirror
"""


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """One file of the lock."""

    architecture: str
    name: str
    version: str
    sha256: str
    path: str


def parse_lock(text: str) -> list[Package]:
    """The packages, sorted. ImageError: a line is not one, or the packages are not PACKAGES."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    for row in rows:
        if len(row) != 5:
            raise ImageError(f"deploy/debian.lock: five words expected in the line {' '.join(row)}")
    packages = sorted(Package(*row) for row in rows)
    expected = sorted((a, name) for a in ARCHITECTURES for name in PACKAGES)
    if [(p.architecture, p.name) for p in packages] != expected:
        raise ImageError(
            "deploy/debian.lock does not have every package of hack/container_image/debian.py once "
            "for each architecture: hack/update-image writes it anew"
        )
    return packages


def lock_text(packages: Sequence[Package]) -> str:
    """The lock file with these packages."""
    return _HEADER + "".join("  ".join(astuple(p)) + "\n" for p in sorted(packages))


def fetch(package: Package, progress: Progress) -> Path:
    """The package's file, from the cache or a mirror; its SHA-256 has been checked."""
    directory = made(
        cache_dir() / f"deb-{package.sha256}", lambda d: _download(package, d), progress
    )
    return directory / "package.deb"


def _download(package: Package, directory: Path) -> None:
    target = directory / "package.deb"
    problems: list[str] = []
    for mirror in _mirrors():
        address = f"{mirror.rstrip('/')}/{package.path}"
        checksum = f"SHA256:{package.sha256}"
        options = ("-o", "APT::Sandbox::User=root")  # another user may not write to the cache
        try:
            run([_APT_HELPER, *options, "download-file", address, str(target), checksum])
        except ImageError as e:
            problems.append(str(e))
        else:
            return
    raise ImageError(
        f"none of this machine's apt sources gave {package.name} {package.version} "
        f"({package.architecture}). A mirror keeps only the newest versions: hack/update-image "
        "pins those. " + "\n".join(problems or ["There is no apt source."])
    )


def _mirrors() -> list[str]:
    listed = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages"], needs=NEEDS
    )
    # From a mirror on this disk apt would make a link, unless it is told to copy.
    return sorted({re.sub("^file:", "copy:", uri) for uri in listed.decode().split()})


def newest(progress: Progress) -> list[Package]:
    """What this machine's apt sources have now; apt checks their signatures."""
    packages: list[Package] = []
    for architecture in ARCHITECTURES:
        progress(f"reading the package lists for {architecture}")
        with _apt(architecture) as environment:
            run(["apt-get", "-qq", "update"], env=environment, needs=NEEDS)
            listed = run(["apt-cache", "show", "--no-all-versions", *PACKAGES], env=environment)
        packages += parse_index(listed.decode(), architecture)
    return sorted(packages)


@contextmanager
def _apt(architecture: str) -> Iterator[Mapping[str, str]]:
    """The environment in which apt has a state of its own, as on a machine of *architecture*."""
    with tempfile.TemporaryDirectory(prefix="dra-image-apt-") as directory:
        config = Path(directory, "apt.conf")
        config.write_text(
            f'Dir::State "{directory}";\nDir::State::status "{directory}/status";\n'
            f'Dir::Cache "{directory}/cache";\nAPT::Architecture "{architecture}";\n'
            f'APT::Architectures {{ "{architecture}"; }};\nAPT::Sandbox::User "root";\n'
            'Acquire::Languages "none";\n'
        )
        Path(directory, "status").touch()
        for place in ("lists/partial", "cache/archives/partial"):
            Path(directory, place).mkdir(parents=True)
        yield {**os.environ, "APT_CONFIG": str(config), "LC_ALL": "C"}


def parse_index(text: str, architecture: str) -> list[Package]:
    """The packages that `apt-cache show` tells of. ImageError: not all of PACKAGES are there."""
    packages = []
    for paragraph in text.strip().split("\n\n"):
        lines = (line.partition(": ") for line in paragraph.splitlines() if line[:1].strip())
        facts = {key: value for key, _, value in lines}
        values = (facts.get(key, "") for key in ("Package", "Version", "SHA256", "Filename"))
        packages.append(Package(architecture, *values))
    if missing := sorted(set(PACKAGES) - {package.name for package in packages}):
        raise ImageError(
            f"this machine's apt sources lack {', '.join(missing)} for {architecture}: {NEEDS}"
        )
    return packages
