"""How many more partitions fit into what is free of a GPU, by the counters that keep them apart."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.model.devices import DeviceName, Gpu
from dra_driver.model.mig import Placement
from dra_driver.model.offer import Device, Offer, counter_set_name


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU could still be cut into."""

    partitions: tuple[tuple[str, int], ...] = ()  # (profile, the most of it), the smallest first
    whole: bool = False  # or all of it could be given to one claim
    offered: bool = False  # it is cut when a claim needs it


NO_ROOM = Room()


def room(
    offered: Offer, gpu: Gpu, taken: Collection[Placement], held: Collection[DeviceName]
) -> Room:
    """*taken*: the placements of *gpu* where something is; *held*: the devices that claims hold."""
    its = [device for device in offered.devices if device.gpu.uuid == gpu.uuid]
    left = _left(offered, gpu, (d for d in its if d.name in held or d.instance is not None))
    by_profile: dict[str, list[Device]] = {}
    for device in its:
        if device.partition is not None and device.cut_for_claims:
            by_profile.setdefault(device.partition.profile.name, []).append(device)
    names = sorted(by_profile, key=lambda name: _size(by_profile[name][0]))
    most = ((name, _most(by_profile[name], left, taken)) for name in names)
    whole = any(d.takes and d.partition is None and _fits(d, left) for d in its) and not taken
    fits = tuple((name, number) for name, number in most if number)
    return Room(fits, whole, offered=bool(by_profile))


def _left(offered: Offer, gpu: Gpu, used: Iterable[Device]) -> dict[str, int]:
    name = counter_set_name(gpu)
    left = {k: v for one in offered.counter_sets if one.name == name for k, v in one.counters}
    for device in used:
        _take(device, left)
    return left


def _take(device: Device, left: dict[str, int]) -> None:
    for name, amount in device.takes:
        left[name] = left.get(name, 0) - amount


def _fits(device: Device, left: Mapping[str, int]) -> bool:
    return all(left.get(name, 0) >= amount for name, amount in device.takes)


def _most(
    devices: Sequence[Device], before: Mapping[str, int], taken: Collection[Placement]
) -> int:
    """Partitions of one profile are equally long: one after the other, from the left, is best."""
    left, number = dict(before), 0
    for device in sorted(devices, key=_start):
        if _fits(device, left) and not any(_placement(device).overlaps(one) for one in taken):
            _take(device, left)
            number += 1
    return number


def _placement(device: Device) -> Placement:
    return device.partition.placement if device.partition else Placement(0, 0)


def _start(device: Device) -> int:
    return _placement(device).start


def _size(device: Device) -> tuple[int, int, str]:
    profile = device.partition.profile if device.partition else None
    return (profile.slices, profile.memory_bytes, profile.name) if profile else (0, 0, "")
