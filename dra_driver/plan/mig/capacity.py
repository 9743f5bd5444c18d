"""What a partition has beside its memory: its engines, and which memory units of the board."""

from api import names
from dra_driver.model.offer import Device


def engines(device: Device) -> dict[str, int]:
    """The engines of a partition, by capacity; nothing for a GPU as a whole."""
    if device.partition is None:
        return {}
    found = device.partition.profile.engines
    return {
        names.MULTIPROCESSORS: found.multiprocessors,
        names.COPY_ENGINES: found.copy,
        names.DECODERS: found.decoders,
        names.ENCODERS: found.encoders,
        names.JPEG_ENGINES: found.jpeg,
        names.OFA_ENGINES: found.ofa,
    }


def memory_slices(device: Device) -> dict[str, int]:
    """Which units a partition has that exists, by capacity: one of each."""
    if device.partition is None or device.instance is None:
        return {}
    placement = device.partition.placement
    units = range(placement.start, placement.end)
    return {f"{names.MEMORY_SLICE}{unit}": 1 for unit in units}
