"""Which shared libraries a program or library asks for, read from the file itself (ELF, 64 bits).

So it works for every architecture, without binutils.
"""

import struct
from collections.abc import Iterator

_DYNAMIC_SEGMENT, _LOADED_SEGMENT = 2, 1
_NEEDED, _STRING_TABLE = 1, 5


def needed(content: bytes) -> list[str]:
    """The names of the libraries; none where this is no such file."""
    if content[:5] != b"\x7fELF\x02":
        return []
    entries = list(_dynamic_entries(content))
    strings = next((value for tag, value in entries if tag == _STRING_TABLE), 0)
    start = _offset(content, strings)
    return [_text(content, start + value) for tag, value in entries if tag == _NEEDED]


def _segments(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Type, place in the file, address and size of each."""
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from(
            "<IIQQQQ", content, table + index * size
        )
        yield kind, offset, address, length


def _dynamic_entries(content: bytes) -> Iterator[tuple[int, int]]:
    for kind, offset, _, length in _segments(content):
        if kind == _DYNAMIC_SEGMENT:
            yield from struct.iter_unpack("<QQ", content[offset : offset + length])


def _offset(content: bytes, address: int) -> int:
    for kind, offset, start, length in _segments(content):
        if kind == _LOADED_SEGMENT and start <= address < start + length:
            return offset + address - start
    return 0


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()
