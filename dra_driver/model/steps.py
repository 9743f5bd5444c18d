"""What has to be done to a node for a claim, as values that can be repeated and undone."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MakeDeviceNodes:
    """The device files of these GPUs exist. Undone by nothing: the files do no harm, and others may
    use them."""

    minors: tuple[int, ...]


Step = MakeDeviceNodes
"""A union like ``Device``: time-slice intervals, MPS servers and partitions join it as further
cases."""
