"""Minor numbers of the device nodes of MIG's capabilities: each instance has its own for good."""

from typing import Final

CONFIG: Final = 1  # of mig/config, which whoever cuts needs
MONITOR: Final = 2  # of mig/monitor
INSTANCES: Final = 15  # GPU instances of each GPU
COMPUTE: Final = 8  # compute instances of each GPU instance
_FIRST: Final = 3  # of the first GPU's GPU instance 0
_EACH: Final = COMPUTE + 1


def minor_of(gpu: int, gi: int, ci: int | None = None) -> int:
    """Of the device node of a GPU instance, or of a compute instance in it.

    >>> minor_of(0, 0), minor_of(0, 0, 0), minor_of(0, 1), minor_of(1, 0)
    (3, 4, 12, 138)
    """
    return _FIRST + (gpu * INSTANCES + gi) * _EACH + (0 if ci is None else 1 + ci)


def capabilities(gpu: int, gi: int, ci: int) -> tuple[int, int]:
    """The two that whoever computes in an instance needs."""
    return minor_of(gpu, gi), minor_of(gpu, gi, ci)
