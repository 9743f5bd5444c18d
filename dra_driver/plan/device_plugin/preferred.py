"""Which devices a container should get by the device-plugin API.

Whole GPUs: those that are close to each other. Replicas and MIG instances, by the profile's
``allocationPolicy``:

===============  ====================================================================
``Auto``         of the GPU of which most is given out, so that others stay free;
                 several are of different GPUs, and of different instances
``Distributed``  the same, of the GPU of which least is given out
``Packed``       of as few GPUs and instances as possible, and of those that just fit
===============  ====================================================================

Replicas of instances that share by MPS are always packed: a program under MPS computes on one
instance.
"""

import heapq
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.offer import EXCLUSIVE, Offer, Replica
from dra_driver.model.profiles import AllocationPolicy, SharingStrategy
from dra_driver.plan.device_plugin.resources import (
    DevicesById,
    ResourceNames,
    listed_devices,
    uuid_of,
)
from dra_driver.plan.device_plugin.topology import closest_gpus


def preferred(  # noqa: PLR0913 - what the kubelet asks, and of whom
    offer: Offer,
    resource: ResourceName,
    available: Sequence[DeviceId],
    must_include: Sequence[DeviceId],
    size: int,
    names: ResourceNames,
) -> tuple[DeviceId, ...]:
    """*size* of the *available* devices, *must_include* among them, sorted; as many as there are,
    if these are fewer. Never an error: the pod would fail."""
    free = set(available)
    included = [id_ for id_ in dict.fromkeys(must_include) if id_ in free][: max(size, 0)]
    free.difference_update(included)
    number = size - len(included)
    if number >= len(free):
        included += free
    elif number > 0:
        devices = listed_devices(offer.devices, names).get(resource, {})
        well = {id_ for id_ in free if id_ in devices and not devices[id_].taints}
        candidates = well if len(well) >= number else free
        included += _chosen(devices, candidates, included, number, free)
    return tuple(sorted(included))


def _chosen(
    devices: DevicesById,
    candidates: Collection[DeviceId],
    included: Sequence[DeviceId],
    number: int,
    free: Collection[DeviceId],
) -> Sequence[DeviceId]:
    """*number* of *candidates* to go with *included*; *free*: all that is not given out."""
    if all(_is_whole_gpu(devices, id_) for id_ in (*candidates, *included)):
        gpus = {devices[id_].gpu: id_ for id_ in (*included, *candidates)}
        ours = [devices[id_].gpu for id_ in included]
        closest = closest_gpus(gpus.keys(), ours, len(ours) + number)
        return [gpus[gpu] for gpu in closest if gpu not in ours]
    units = _units(devices, candidates, included, free)
    policy = _policy(devices)
    if policy is AllocationPolicy.PACKED:
        return list(_packed(units, number))
    return list(_spread(units, number, most_used=policy is AllocationPolicy.AUTO))


def _is_whole_gpu(devices: DevicesById, id_: DeviceId) -> bool:
    device = devices.get(id_)
    return device is not None and device.partition is None and device.shape == EXCLUSIVE


def _policy(devices: DevicesById) -> AllocationPolicy:
    """That of the GPU with the lowest number: an order among GPUs cannot be of one GPU alone."""
    first = min(devices.values(), key=lambda device: device.gpu.minor, default=None)
    if first is None:
        return AllocationPolicy.AUTO
    by_mps = first.rules.default_strategy is SharingStrategy.MPS
    if by_mps and first.partition is not None and isinstance(first.shape, Replica):
        return AllocationPolicy.PACKED
    return first.rules.allocation_policy


@dataclass(slots=True)
class _Gpu:
    """What others have of a GPU, and what this container has."""

    listed: int = 0  # all devices of it
    given_out: int = 0
    taken: int = 0

    @property
    def used(self) -> float:
        """How much of it others have, 0 … 1."""
        return self.given_out / self.listed if self.listed else 0.0


@dataclass(slots=True)
class _Unit:
    """A GPU or an instance of which something is to be had: one device, or replicas."""

    gpu: _Gpu
    place: int  # among the others
    ids: list[DeviceId]  # to be had, the first of them last
    given_out: int  # to others
    taken: int  # for this container

    def take(self) -> DeviceId:
        self.taken += 1
        self.gpu.taken += 1
        return self.ids.pop()


def _units(
    devices: DevicesById,
    candidates: Collection[DeviceId],
    included: Collection[DeviceId],
    free: Collection[DeviceId],
) -> list[_Unit]:
    """What *candidates* are of, by number of the GPU."""
    gpus = {uuid_of(id_): device.gpu for id_, device in devices.items()}
    counts: dict[GpuUuid, _Gpu] = defaultdict(_Gpu)
    given_out = Counter(map(uuid_of, devices.keys() - {*free, *included}))
    taken = Counter(map(uuid_of, included))
    for uuid, number in Counter(map(uuid_of, devices)).items():
        counts[gpus[uuid].uuid].listed += number
        counts[gpus[uuid].uuid].given_out += given_out[uuid]
    for uuid, number in taken.items():
        counts[gpus[uuid].uuid if uuid in gpus else uuid].taken += number
    ids: dict[GpuUuid, list[DeviceId]] = defaultdict(list)
    for id_ in sorted(sorted(candidates, reverse=True), key=len, reverse=True):  # 10 after 9
        ids[uuid_of(id_)].append(id_)
    known = sorted((gpus[uuid].minor, uuid) for uuid in ids if uuid in gpus)
    in_order = [*(uuid for _, uuid in known), *sorted(uuid for uuid in ids if uuid not in gpus)]
    return [
        _Unit(
            counts[gpus[uuid].uuid if uuid in gpus else uuid],
            place,
            ids[uuid],
            given_out[uuid],
            taken[uuid],
        )
        for place, uuid in enumerate(in_order)
    ]


def _spread(units: Sequence[_Unit], number: int, *, most_used: bool) -> Iterator[DeviceId]:
    """*number* devices of as many GPUs and units as possible, beginning with those of which most is
    given out, or least."""
    sign = -1 if most_used else 1

    def rank(unit: _Unit) -> tuple[float, ...]:
        used = (sign * unit.gpu.used, sign * unit.given_out)
        return (unit.gpu.taken, unit.taken, *used, unit.place)

    queue = [(rank(unit), unit.place, unit) for unit in units]
    heapq.heapify(queue)
    while number > 0:
        ranked, place, unit = heapq.heappop(queue)
        if ranked == rank(unit):  # else something else was taken of its GPU meanwhile
            yield unit.take()
            number -= 1
        if unit.ids:
            heapq.heappush(queue, (rank(unit), place, unit))


def _packed(units: Sequence[_Unit], number: int) -> Iterator[DeviceId]:
    """*number* devices of as few GPUs as possible, and there of as few units."""
    by_gpu: dict[int, list[_Unit]] = defaultdict(list)
    for unit in units:
        by_gpu[id(unit.gpu)].append(unit)
    groups = list(by_gpu.values())
    gpu_rooms = [sum(len(unit.ids) for unit in group) for group in groups]
    gpus_in_use = [group[0].gpu.taken > 0 for group in groups]
    for group, of_gpu in _fewest(groups, gpu_rooms, gpus_in_use, number):
        rooms = [len(unit.ids) for unit in group]
        for unit, of_unit in _fewest(group, rooms, [unit.taken > 0 for unit in group], of_gpu):
            for _ in range(of_unit):
                yield unit.take()


_Group = TypeVar("_Group")


def _fewest(
    groups: Sequence[_Group], rooms: Sequence[int], in_use: Sequence[bool], number: int
) -> Iterator[tuple[_Group, int]]:
    """How many to take of which, *number* in all: first of those that are in use, then of the
    smallest one that suffices, and else of the largest."""
    for are_in_use in (True, False):
        by_room = sorted(
            (room, place) for place, room in enumerate(rooms) if in_use[place] is are_in_use
        )
        while number > 0 and by_room:
            suffices = bisect_left(by_room, (min(number, by_room[-1][0]),))
            room, place = by_room.pop(suffices)
            yield groups[place], min(room, number)
            number -= room
