"""What an ELF shared library says of itself: for which machine it is, and its DT_SONAME.

Only the few bytes that matter are read, with ``pread``: a driver is 600 MB of libraries.
Layout: System V ABI, "ELF Header", "Program Header", "Dynamic Section".
"""

import os
import struct
from dataclasses import dataclass
from typing import Final

from dra_driver.errors import NodeError

_EHDR: Final = struct.Struct("<4sBBB9xHHIQQQIHHH")  # up to e_phnum
_PHDR: Final = struct.Struct("<IIQQQQQQ")
_DYN: Final = struct.Struct("<qQ")
_ELFCLASS64, _LITTLE_ENDIAN = 2, 1
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64
_LONGEST_NAME: Final = 256
_MOST_BYTES: Final = 1 << 20  # of program headers or of a dynamic section: real ones have some KiB


@dataclass(frozen=True, slots=True)
class Elf:
    """A 64-bit library. *soname* is None where it was linked without one."""

    machine: str  # "x86_64", "aarch64"
    soname: str | None


@dataclass(frozen=True, slots=True)
class _Segment:
    type: int
    offset: int
    address: int
    size: int  # in the file


def read_elf(path: str) -> Elf | None:
    """Look into the library at *path*; None where it is for a machine that is not served here
    (32-bit compatibility libraries, say).

    NodeError: it cannot be read, is no ELF file, or ends too early.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise NodeError(f"cannot read the library {path}: {e.strerror}") from e
    except (struct.error, ValueError, OverflowError) as e:
        raise NodeError(
            f"{path} is not a whole ELF library ({e}): is the driver being installed right now?"
        ) from e


def _read(fd: int) -> Elf | None:
    magic, bits, order, _, _, machine, _, _, phoff, _, _, _, phentsize, phnum = _EHDR.unpack(
        _bytes(fd, 0, _EHDR.size)
    )
    if magic != b"\x7fELF":
        raise ValueError("no ELF header")
    if bits != _ELFCLASS64 or order != _LITTLE_ENDIAN or machine not in _MACHINES:
        return None
    if phentsize != _PHDR.size:
        raise ValueError(f"program headers of {phentsize} bytes")
    table = _bytes(fd, phoff, phentsize * phnum)
    segments = [_Segment(h[0], h[2], h[3], h[5]) for h in _PHDR.iter_unpack(table)]
    return Elf(_MACHINES[machine], _soname(fd, segments))


def _soname(fd: int, segments: list[_Segment]) -> str | None:
    dynamic = next((s for s in segments if s.type == _PT_DYNAMIC), None)
    if dynamic is None:
        raise ValueError("no dynamic section")
    entries: dict[int, int] = {}
    for tag, value in _DYN.iter_unpack(_bytes(fd, dynamic.offset, dynamic.size)):
        if tag == _DT_NULL:
            break
        entries[tag] = value
    if _DT_SONAME not in entries:
        return None
    strings = _file_offset(entries.get(_DT_STRTAB, 0), segments)
    raw = os.pread(fd, _LONGEST_NAME, strings + entries[_DT_SONAME])
    name, end, _ = raw.partition(b"\0")
    if not end or not name or b"/" in name:
        raise ValueError("no legal DT_SONAME")
    return name.decode("ascii")


def _file_offset(address: int, segments: list[_Segment]) -> int:
    """Dynamic entries name memory addresses; the file holds them where a segment says."""
    for segment in segments:
        if segment.type == _PT_LOAD and 0 <= address - segment.address < segment.size:
            return segment.offset + address - segment.address
    raise ValueError(f"address {address:#x} is in no segment")


def _bytes(fd: int, offset: int, size: int) -> bytes:
    if size > _MOST_BYTES:
        raise ValueError(f"a table of {size} bytes")
    found = os.pread(fd, size, offset)
    if len(found) != size:
        raise ValueError(f"{size} bytes expected at {offset:#x}, {len(found)} found")
    return found
