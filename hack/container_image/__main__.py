"""The commands hack/image and hack/update-image."""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hack.container_image import debian
from hack.container_image.build import LOCK, REPOSITORY, Built, build, fetch
from hack.container_image.commands import run
from hack.container_image.errors import ImageError
from hack.testbed.errors import ClusterError

_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?::\d+(?=/))?(?:/{_PART})*(?::[\w][\w.-]*)?")
_ENGINES = ("docker", "podman")
_ENGINE_SECONDS = 20  # for an engine to say whether it works


def main() -> int:
    """0: built; 1: not, and standard error says why."""
    options = _parser().parse_args()
    try:
        if options.update:
            LOCK.write_text(debian.lock_text(debian.newest(_progress)))
            print(f"wrote {LOCK.relative_to(REPOSITORY)}")
            return 0
        if options.fetch:
            fetch(_progress)
            return 0
        built = build(with_tag(options.name), options.directory, _progress)
        print(report(built))
        load(built.archive)
    except (ImageError, ClusterError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/image",
        description="Build the driver's image for amd64 and arm64 into an OCI archive, with its "
        "SBOM beside it, and load it into Docker or Podman where one works. Twice built, the "
        "archive is the same, byte for byte.",
    )
    parser.add_argument("name", nargs="?", default="dra-driver-gpu", help="NAME or NAME:TAG")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("dist"),
        help="where to write it, from the root of the repository (dist)",
    )
    parser.add_argument(
        "--fetch", action="store_true", help="only download what it is made of, for a later build"
    )
    parser.add_argument("--update", action="store_true", help=argparse.SUPPRESS)
    return parser


def with_tag(name: str) -> str:
    """The version of the project is the tag that the chart asks for. ImageError: it is no name."""
    if not _NAME.fullmatch(name):
        raise ImageError(
            f"{name} is no name of an image: expected is NAME or NAME:TAG, lower case before the "
            "tag, as in localhost/dra-driver-gpu:0.1.0"
        )
    if ":" in name.rpartition("/")[2]:
        return name
    project = (REPOSITORY / "pyproject.toml").read_text()
    return f"{name}:{project.partition('version = ')[2].split(chr(34))[1]}"


def _progress(line: str) -> None:
    print(f"==> {line}", file=sys.stderr)


def report(built: Built) -> str:
    """What the command prints of it."""
    lines = [f"archive  {built.archive}"]
    lines += [f"SBOM     {path}" for path in built.sboms]
    lines += [
        f"size     {size.architecture}: {size.packed / 1e6:.1f} MB to pull, "
        f"{size.unpacked / 1e6:.1f} MB on the node"
        for size in built.sizes
    ]
    lines += ["         arm64 has not been tried on a machine", f"digest   {built.digest}"]
    return "\n".join(lines)


def load(archive: Path) -> None:
    """Hand the archive to every container engine here that works."""
    for engine in _ENGINES:
        if not _works(engine):
            continue
        _progress(f"loading it into {engine}")
        print(run([engine, "load", "--input", str(archive)]).decode().strip())


def _works(engine: str) -> bool:
    if not shutil.which(engine):
        return False
    try:
        answer = subprocess.run(
            [engine, "info"], capture_output=True, timeout=_ENGINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
