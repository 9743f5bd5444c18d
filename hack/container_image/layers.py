"""Layers of an image: files in a tar archive, the same bytes for the same files.

Run as a program by the Python of the image: it compiles the modules of a directory, packs the
directory into a layer and prints the layer's digests. It imports nothing but the standard library.
"""

import gzip
import hashlib
import io
import json
import py_compile
import shutil
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link in an image."""

    target: str


Content = Path | bytes | Link
"""What a path (without a leading slash) has in an image: that of a file of this machine, bytes, or
a link."""

# Level of the bytecode: without docstrings, which take 2 MiB of each process, and without the
# driver's assertions, which only tell the type checker what something is.
OPTIMIZE = 2
_READ_BYTES = 1 << 20


def write_tar(output: IO[bytes], files: Mapping[str, Content]) -> None:
    """The files and their directories, sorted, with root as owner and without times."""
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for directory in _directories(files):
            entry = tarfile.TarInfo(directory)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if directory == "tmp" else 0o755
            tar.addfile(entry)
        for path, content in sorted(files.items()):
            _add_content(tar, path, content)


def _directories(files: Mapping[str, object]) -> list[str]:
    parents = {str(parent) for path in files for parent in Path(path).parents}
    return sorted(parents - {"."} | {"tmp", "root"})


def _add_content(tar: tarfile.TarFile, path: str, content: Content) -> None:
    match content:
        case Link(target=target):
            entry = tarfile.TarInfo(path)
            entry.type = tarfile.SYMTYPE
            entry.linkname = target
            tar.addfile(entry)
        case Path():
            is_program = content.stat().st_mode & 0o100
            # Not the file's own mode: that depends on the umask.
            add_file(tar, path, content.read_bytes(), 0o755 if is_program else 0o644)
        case bytes():
            add_file(tar, path, content)


def add_file(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    """A file of root's, from the beginning of time: that is what makes the archive repeatable."""
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    entry.mode = mode
    tar.addfile(entry, io.BytesIO(content))


def files_in(tree: Path) -> dict[str, Content]:
    """The files and links below a directory, by path."""
    paths = [path for path in tree.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {
        str(path.relative_to(tree)): Link(str(path.readlink())) if path.is_symlink() else path
        for path in paths
    }


def compile_modules(tree: Path) -> None:
    """Write the bytecode of every module, which is never held against its source again."""
    for path in sorted(tree.rglob("*.py")):
        py_compile.compile(
            str(path),
            dfile=f"/{path.relative_to(tree)}",
            doraise=True,
            optimize=OPTIMIZE,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


def pack(tree: Path, target: Path) -> dict[str, str | int]:
    """Write the directory as a compressed layer; what the image says of it."""
    plain = target.with_suffix(".tar")
    with plain.open("wb") as output:
        write_tar(output, files_in(tree))
    with (
        plain.open("rb") as source,
        target.open("wb") as output,
        gzip.GzipFile("", "wb", 6, output, mtime=0) as packed,
    ):
        shutil.copyfileobj(source, packed, _READ_BYTES)
    layer: dict[str, str | int] = {
        "digest": _digest(target),
        "size": target.stat().st_size,
        "diff_id": _digest(plain),
        "unpacked": plain.stat().st_size,
    }
    plain.unlink()
    return layer


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def main() -> None:
    """Arguments: the directory, and the file to write."""
    tree, target = Path(sys.argv[1]), Path(sys.argv[2])
    compile_modules(tree)
    print(json.dumps(pack(tree, target)))


if __name__ == "__main__":
    main()
