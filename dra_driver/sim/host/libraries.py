"""The driver's libraries and firmware of a simulated host.

A library is the smallest shared object that a dynamic linker loads.
"""

import platform
import struct
from functools import cache
from typing import Final

from dra_driver.sim.host.files import FileTree, SimulatedFile, SimulatedLink

# ELF-64 Object File Format 1.5 and System V ABI, chapters 4 and 5.
_MACHINES = {"x86_64": 62, "aarch64": 183}  # EM_X86_64, EM_AARCH64
_HEADER, _PROGRAM_HEADER, _DYNAMIC, _SYMBOL = 64, 56, 16, 24  # sizes
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ_WRITE = 6
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 4, 5, 6, 10, 11, 14
_PAGE = 0x10000  # the largest page of either machine


@cache
def shared_object(soname: str, machine: str | None = None) -> bytes:
    """A library called *soname* for *machine* (this one's), without a single symbol.

    Everything lies in one segment, so a file offset is also an address. That one is writable,
    because glibc relocates the dynamic section in place, and no stack has to be executable.
    """
    names = b"\0" + soname.encode() + b"\0"
    program_headers = 3
    at_dynamic = _HEADER + program_headers * _PROGRAM_HEADER
    at_hash = at_dynamic + 7 * _DYNAMIC
    at_symbols = at_hash + 16
    at_names = at_symbols + _SYMBOL
    size = at_names + len(names)

    dynamic = [
        (_DT_SONAME, 1),
        (_DT_HASH, at_hash),
        (_DT_SYMTAB, at_symbols),
        (_DT_STRTAB, at_names),
        (_DT_STRSZ, len(names)),
        (_DT_SYMENT, _SYMBOL),
        (0, 0),
    ]
    return b"".join(
        (
            _header(_MACHINES[machine or platform.machine()], program_headers),
            _program_header(_PT_LOAD, 0, size, _PAGE),
            _program_header(_PT_DYNAMIC, at_dynamic, len(dynamic) * _DYNAMIC, 8),
            _program_header(_PT_GNU_STACK, 0, 0, 16),
            *(struct.pack("<QQ", tag, value) for tag, value in dynamic),
            struct.pack("<IIII", 1, 1, 0, 0),  # one bucket, one symbol, both nothing
            bytes(_SYMBOL),
            names,
        )
    )


def _header(machine: int, program_headers: int) -> bytes:
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)  # 64 bits, little-endian
    shared = 3  # ET_DYN
    sizes = (_HEADER, _PROGRAM_HEADER, program_headers, 0, 0, 0)  # no section headers
    return identity + struct.pack("<HHIQQQIHHHHHH", shared, machine, 1, 0, _HEADER, 0, 0, *sizes)


def _program_header(kind: int, offset: int, size: int, align: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, _READ_WRITE, offset, offset, offset, size, size, align)


# Each library of the 580 driver that computes, encodes or renders without a display, with the
# number in its soname (None: the driver's version) and whether there is a plain ".so" for linking:
# the driver's own .manifest.
_LIBRARIES: Final = (
    ("libcuda", "1", True),
    ("libcudadebugger", "1", False),
    ("libnvcuvid", "1", True),
    ("libnvidia-allocator", "1", True),
    ("libnvidia-cfg", "1", True),
    ("libnvidia-encode", "1", True),
    ("libnvidia-fbc", "1", True),
    ("libnvidia-gpucomp", None, False),
    ("libnvidia-ml", "1", True),
    ("libnvidia-ngx", "1", False),
    ("libnvidia-nvvm", "4", True),
    ("libnvidia-opencl", "1", False),
    ("libnvidia-opticalflow", "1", True),
    ("libnvidia-pkcs11-openssl3", None, False),
    ("libnvidia-ptxjitcompiler", "1", True),
    ("libnvidia-rtcore", None, False),
    ("libnvidia-sandboxutils", "1", True),
    ("libnvoptix", "1", False),
)
_FIRMWARE: Final = ("gsp_ga10x.bin", "gsp_tu10x.bin")


def library_directory() -> str:
    """Where Debian and Ubuntu keep libraries of this machine."""
    return f"usr/lib/{platform.machine()}-linux-gnu"


def driver_libraries(version: str) -> FileTree:
    """The libraries of driver *version* with their links, and its firmware."""
    tree: FileTree = {}
    for name, number, development in _LIBRARIES:
        file = f"{name}.so.{version}"
        soname = f"{name}.so.{number}" if number else file
        tree[f"{library_directory()}/{file}"] = SimulatedFile(shared_object(soname), 0o755)
        if number:
            tree[f"{library_directory()}/{soname}"] = SimulatedLink(file)
        if development:
            tree[f"{library_directory()}/{name}.so"] = SimulatedLink(soname)
    for name in _FIRMWARE:
        tree[f"lib/firmware/nvidia/{version}/{name}"] = SimulatedFile(b"simulated firmware\n")
    return tree
