"""ELF shared libraries of a few hundred bytes: enough to read, nothing to run."""

import struct

_MACHINES = {"x86_64": 62, "aarch64": 183, "i386": 3}
_ADDRESS = 0x10000  # where the segment is loaded: another number than its offset in the file


def elf_library(soname: str | None, machine: str = "x86_64") -> bytes:
    """A 64-bit library; for i386 a 32-bit one, of which only the header is real."""
    if machine == "i386":
        return struct.pack("<4sBBB9xHH", b"\x7fELF", 1, 1, 1, 3, 3) + bytes(80)
    strings = b"\0libc.so.6\0" + (soname or "").encode() + b"\0"
    dynamic_at, strings_at = 64 + 2 * 56, 64 + 2 * 56 + 4 * 16
    size = strings_at + len(strings)
    header = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 3, _MACHINES[machine], 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0),
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, _ADDRESS, _ADDRESS, size, size, 4096)
    at = _ADDRESS + dynamic_at
    dynamic = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, at, at, 64, 64, 8)
    entries = [(1, 1), (5, _ADDRESS + strings_at), (14, 11) if soname else (30, 0), (0, 0)]
    table = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    return header + load + dynamic + table + strings
