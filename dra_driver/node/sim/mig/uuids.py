"""UUIDs of simulated MIG instances: each says what it is.

A daemon of MPS knows by it what it serves, although it runs beside a simulated host of its own.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "MIG-"
_FORM: Final = re.compile(r"MIG-(\w{8})-(\w{4})-8(\w{3})-(\w{2})(\w{2})-(\w{2})(\w{10})")


@dataclass(frozen=True, slots=True)
class Said:
    """What a UUID says."""

    minor: int  # of its GPU
    number: int  # NVML_GPU_INSTANCE_PROFILE_*
    start: int
    gi: int
    ci: int
    tag: int  # of its GPU's UUID

    def is_of(self, gpu: str) -> bool:
        """Whether it can be an instance of the GPU with this UUID."""
        return self.tag == tag(gpu)


def tag(gpu: str) -> int:
    """A number by which UUIDs of GPUs differ."""
    return zlib.crc32(gpu.encode())


def mig_uuid(said: Said) -> str:
    """The UUID that says it, in the form of version 8, which leaves its bits to its maker.

    >>> mig_uuid(Said(minor=2, number=0, start=3, gi=9, ci=0, tag=tag("GPU-1")))
    'MIG-3d2ce8ca-0002-8000-8309-0000fc7fca68'
    """
    mixed = zlib.crc32(repr(said).encode())  # so that the first letters differ
    return (
        f"{PREFIX}{mixed:08x}-{said.minor:04x}-8{said.number:03x}-"
        f"{0x80 | said.start:02x}{said.gi:02x}-{said.ci:02x}{said.tag:010x}"
    )


def read(text: str) -> Said | None:
    """What *text* says; None: it is no UUID of a simulated instance."""
    match = _FORM.fullmatch(text)
    try:
        parts = [int(part, 16) for part in match.groups()] if match else []
    except ValueError:
        return None
    if not parts:
        return None
    _, minor, number, start, gi, ci, of_gpu = parts
    said = Said(minor, number, start & 0x3F, gi, ci, of_gpu)
    return said if mig_uuid(said) == text else None
