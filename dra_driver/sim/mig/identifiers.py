"""UUIDs of simulated MIG instances, and minor numbers of the device nodes of their capabilities.

Each UUID says what it is: a daemon of MPS knows by it what it serves, although it runs beside a
simulated host of its own. Each instance has its minor numbers for good.
"""

import re
import zlib
from dataclasses import astuple
from typing import Final

from dra_driver.base.frozen import frozen

CONFIG_MINOR: Final = 1  # of mig/config, needed to create instances
MONITOR_MINOR: Final = 2  # of mig/monitor
GPU_INSTANCES_PER_GPU: Final = 15  # GPU instances of each GPU
COMPUTE_INSTANCES_PER_GPU_INSTANCE: Final = 8  # compute instances of each GPU instance
_FIRST: Final = 3  # of the first GPU's GPU instance 0
_EACH: Final = COMPUTE_INSTANCES_PER_GPU_INSTANCE + 1


def minor_of(gpu: int, gi: int, ci: int | None = None) -> int:
    """Of the device node of a GPU instance, or of a compute instance in it.

    >>> minor_of(0, 0), minor_of(0, 0, 0), minor_of(0, 1), minor_of(1, 0)
    (3, 4, 12, 138)
    """
    return _FIRST + (gpu * GPU_INSTANCES_PER_GPU + gi) * _EACH + (0 if ci is None else 1 + ci)


def capability_minors(gpu: int, gi: int, ci: int) -> tuple[int, int]:
    """The two that whoever computes in an instance needs."""
    return minor_of(gpu, gi), minor_of(gpu, gi, ci)


MIG_PREFIX: Final = "MIG-"
_FORM: Final = re.compile(r"MIG-(\w{8})-(\w{4})-8(\w{3})-(\w{2})(\w{2})-(\w{2})(\w{10})")


@frozen
class MigUuidParts:
    """What a UUID says."""

    minor: int  # of its GPU
    number: int  # NVML_GPU_INSTANCE_PROFILE_*
    start: int
    gi: int
    ci: int
    tag: int  # of its GPU's UUID

    def is_of(self, gpu: str) -> bool:
        """Whether it can be an instance of the GPU with this UUID."""
        return self.tag == uuid_tag(gpu)


def uuid_tag(gpu: str) -> int:
    """A number by which UUIDs of GPUs differ."""
    return zlib.crc32(gpu.encode())


def mig_uuid(parts: MigUuidParts) -> str:
    """The UUID that says it, in the form of version 8, which leaves its bits to its maker.

    >>> mig_uuid(MigUuidParts(minor=2, number=0, start=3, gi=9, ci=0, tag=uuid_tag("GPU-1")))
    'MIG-a32a28f2-0002-8000-8309-0000fc7fca68'
    """
    mixed = zlib.crc32(repr(astuple(parts)).encode())  # so that the first letters differ
    return (
        f"{MIG_PREFIX}{mixed:08x}-{parts.minor:04x}-8{parts.number:03x}-"
        f"{0x80 | parts.start:02x}{parts.gi:02x}-{parts.ci:02x}{parts.tag:010x}"
    )


def parse_mig_uuid(text: str) -> MigUuidParts | None:
    """What *text* says; None: it is no UUID of a simulated instance."""
    match = _FORM.fullmatch(text)
    try:
        parts = [int(part, 16) for part in match.groups()] if match else []
    except ValueError:
        return None
    if not parts:
        return None
    _, minor, number, start, gi, ci, of_gpu = parts
    uuid_parts = MigUuidParts(minor, number, start & 0x3F, gi, ci, of_gpu)
    return uuid_parts if mig_uuid(uuid_parts) == text else None
