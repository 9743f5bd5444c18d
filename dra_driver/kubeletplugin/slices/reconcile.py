"""Which writes bring the ResourceSlices of a node from what they are to what we want.

A pool is all slices of one driver with one pool name. The scheduler uses the newest generation of
a pool, once it has as many slices as each of them says; it sees slices one by one as they are
written, so every step on the way has to be safe too: either one slice changes and the pool stays
whole, or all move to a new generation and the pool is incomplete until the last of them is there.
(k8s.io/dynamic-resource-allocation/resourceslice does the same.)
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dra_driver.kubeletplugin.slices.comparison import (
    comparable_spec,
    same_taint_times,
    taint_times,
    with_taint_times,
)

Document = Mapping[str, Any]

MAX_DEVICES = 128  # ResourceSliceMaxDevices
MAX_DEVICES_ADVANCED = 64  # ...WithAdvancedFeatures: taints, counters or lists on any of them
MAX_COUNTER_SETS = 8  # ResourceSliceMaxCounterSets

_MAX_NAME_PREFIX = 58  # of a generated name: the API server would cut it there, and refuse 254
_INDEX = re.compile(r"([0-9a-f]{5,})-")
_LISTS = ("bools", "ints", "strings", "versions")
_NOTHING_KEPT: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SliceContent:
    """One slice: devices, or counter sets (never both, since 1.35), as documents of v1."""

    devices: tuple[Document, ...] = ()
    shared_counters: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """What a node publishes. Slices and devices stand in the order in which they are tried.

    A node without devices has a pool of one empty slice, which shows that its driver is alive.
    """

    name: str
    slices: tuple[SliceContent, ...] = (SliceContent(),)

    @property
    def devices(self) -> tuple[Document, ...]:
        """All its devices, in order."""
        return tuple(device for each in self.slices for device in each.devices)


@dataclass(frozen=True, slots=True)
class SliceOwner:
    """Whose slices: this driver's on this node. They vanish with the Node of this UID."""

    driver: str
    node: str
    node_uid: str

    @property
    def owner(self) -> dict[str, Any]:
        """The owner reference that says so."""
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self.node,
            "uid": self.node_uid,
            "controller": True,
        }


@dataclass(frozen=True, slots=True)
class SliceWrites:
    """Slices of v1 to delete, then to update, then to create, each in this order."""

    delete: tuple[Document, ...] = ()
    update: tuple[Document, ...] = ()
    create: tuple[Document, ...] = ()

    def __len__(self) -> int:
        return len(self.delete) + len(self.update) + len(self.create)


def split_into_slices(
    name: str, devices: Sequence[Document], shared_counters: Sequence[Document] = ()
) -> Pool:
    """A pool of *devices* and counter sets, as many to a slice as the API server takes.

    Where there are counter sets, slices end where the devices of one do, if that makes few slices
    more: then a change of these devices alone is one update, and the pool stays whole.
    """
    most = MAX_DEVICES_ADVANCED if any(map(is_advanced, devices)) else MAX_DEVICES
    by_devices = _by_counter_set(devices, most) if shared_counters else _parts(devices, most)
    slices = [
        *(SliceContent(shared_counters=part) for part in _parts(shared_counters, MAX_COUNTER_SETS)),
        *(SliceContent(devices=part) for part in by_devices),
    ]
    return Pool(name, tuple(slices) or (SliceContent(),))


def is_advanced(device: Document) -> bool:
    """Whether *device* has what halves the number of devices that fit into its slice."""
    attributes = (device.get("attributes") or {}).values()
    return bool(
        device.get("taints")
        or device.get("consumesCounters")
        or any(kind in attribute for attribute in attributes for kind in _LISTS)
    )


def plan_writes(
    wanted: Pool,
    seen: Sequence[Document],
    home: SliceOwner,
    kept: Mapping[str, str] = _NOTHING_KEPT,
) -> SliceWrites:
    """The writes that turn the *seen* slices of *home* into *wanted*; none if they are that.

    Slices of other drivers and nodes are left alone, those of other pools of *home* go. *kept*:
    what the API server is known to make of a content (``slice_content.content``), where that is
    something else, because a feature is off there; a slice that is that is as wanted.
    """
    ours = sorted((each for each in seen if _is_at(each, home)), key=_name)
    pool = [each for each in ours if _pool(each).get("name") == wanted.name]
    generation = max((_generation(each) for each in pool), default=0)
    times = taint_times(each["spec"] for each in pool)
    specs = [with_taint_times(spec, times) for spec in _specs(wanted, home)]
    standing = _reusable_slices(pool, generation, len(specs))
    differs = [
        index
        for index, spec in enumerate(specs)
        if index not in standing
        or not (_same(spec, standing[index], home, kept) and same_taint_times(spec, times))
    ]
    if len(differs) > 1 or any(index not in standing for index in differs):
        generation, differs = generation + 1, list(range(len(specs)))
    documents = {
        index: _document(index, _numbered(specs[index], generation), home, standing.get(index))
        for index in differs
    }
    stay = {_name(each) for each in standing.values()}
    return SliceWrites(
        delete=tuple(each for each in ours if _name(each) not in stay),
        update=tuple(document for index, document in documents.items() if index in standing),
        create=tuple(document for index, document in documents.items() if index not in standing),
    )


def _parts(items: Sequence[Document], most: int) -> list[tuple[Document, ...]]:
    return [tuple(items[start : start + most]) for start in range(0, len(items), most)]


def _by_counter_set(devices: Sequence[Document], most: int) -> list[tuple[Document, ...]]:
    """Slices of complete groups, where those are not many more than there have to be.

    Each group has as much room as the largest one needs, whatever it needs itself, so that what
    becomes of one does not move those behind it.
    """
    groups = _groups(devices)
    number = Counter(_counter_sets(group[0]) for group in groups)
    largest = max(map(len, groups), default=0)
    least = _parts(devices, most)
    if largest > most:
        return least
    found: list[list[Document]] = []
    left = 0
    for group in groups:
        # A device apart from the rest of its counter sets, or of none, comes in between.
        sets = _counter_sets(group[0])
        between = len(group) == 1 and not (sets and number[sets] == 1)
        needed = 1 if between else largest
        if needed > left:
            found.append([])
            left = most
        found[-1].extend(group)
        left -= needed
    too_many = len(found) > len(least) + max(1, len(least) // 3)
    return least if too_many else [tuple(part) for part in found]


def _groups(devices: Iterable[Document]) -> list[list[Document]]:
    """Devices side by side that take of the same counter sets, with those in between that take of
    none; each other one of these alone."""
    found: list[list[Document]] = []
    of_none: list[Document] = []
    for device in devices:
        sets = _counter_sets(device)
        if not sets:
            of_none.append(device)
        elif found and _counter_sets(found[-1][0]) == sets:
            found[-1] += [*of_none, device]
            of_none = []
        else:
            found += [*([one] for one in of_none), [device]]
            of_none = []
    return [*found, *([one] for one in of_none)]


def _counter_sets(device: Document) -> tuple[str, ...]:
    return tuple(each["counterSet"] for each in device.get("consumesCounters") or ())


def _specs(wanted: Pool, home: SliceOwner) -> list[dict[str, Any]]:
    slices = wanted.slices or (SliceContent(),)
    return [
        {
            "driver": home.driver,
            "nodeName": home.node,
            "pool": {"name": wanted.name, "resourceSliceCount": len(slices)},
            "devices": list(each.devices),
            "sharedCounters": list(each.shared_counters),
        }
        for each in slices
    ]


def _numbered(spec: Document, generation: int) -> dict[str, Any]:
    plain = {key: value for key, value in spec.items() if value != []}
    return {**plain, "pool": {**spec["pool"], "generation": generation}}


def _reusable_slices(pool: Sequence[Document], generation: int, count: int) -> dict[int, Document]:
    """The slices that can stay, by index; the others are of older generations or superfluous."""
    found: dict[int, Document] = {}
    for each in pool:
        index = _index(each)
        if index is not None and index < count and _generation(each) == generation:
            found.setdefault(index, each)
    return found


def _same(spec: Document, seen: Document, home: SliceOwner, kept: Mapping[str, str]) -> bool:
    wanted = comparable_spec(spec)
    return (
        comparable_spec(seen["spec"]) in (wanted, kept.get(wanted))
        and _pool(seen).get("resourceSliceCount") == spec["pool"]["resourceSliceCount"]
        and home.owner in (seen["metadata"].get("ownerReferences") or ())
    )


def _document(
    index: int, spec: Document, home: SliceOwner, seen: Document | None
) -> dict[str, Any]:
    """A new slice, or the *seen* one with our owner and *spec*; labels of others stay on it."""
    metadata: dict[str, Any]
    if seen is None:
        # The API server cuts the prefix of generated names at 58 characters: the index comes first.
        metadata = {"generateName": f"{index:05x}-{home.driver}-{home.node}-"[:_MAX_NAME_PREFIX]}
    else:
        metadata = {k: v for k, v in seen["metadata"].items() if k != "managedFields"}
    metadata["ownerReferences"] = [home.owner]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": dict(spec),
    }


def _is_at(document: Document, home: SliceOwner) -> bool:
    spec = document.get("spec") or {}
    return (spec.get("driver"), spec.get("nodeName")) == (home.driver, home.node)


def _index(document: Document) -> int | None:
    match = _INDEX.match(_name(document))
    return int(match[1], 16) if match else None


def _pool(document: Document) -> Document:
    pool: Document = document["spec"].get("pool") or {}
    return pool


def _generation(document: Document) -> int:
    return int(_pool(document).get("generation") or 0)


def _name(document: Document) -> str:
    return str(document["metadata"]["name"])


def pool_problems(pool: Pool) -> tuple[str, ...]:
    """Why the scheduler could use nothing of *pool*, though the API server takes each slice."""
    names = Counter(str(device.get("name")) for device in pool.devices)
    problems = [f"device {name!r} is there more than once" for name in names if names[name] > 1]
    counters: dict[str, Collection[str]] = {}
    for counter_set in (each for part in pool.slices for each in part.shared_counters):
        name = counter_set["name"]
        if name in counters:
            problems.append(f"counter set {name!r} is there more than once")
        counters[name] = counter_set["counters"]
    for device in pool.devices:
        for consumed in device.get("consumesCounters") or ():
            missing = set(consumed["counters"]) - set(counters.get(consumed["counterSet"], ()))
            problems += (
                f"device {device['name']!r} consumes counter {key!r} of "
                f"{consumed['counterSet']!r}, which the pool does not have"
                for key in sorted(missing)
            )
    return tuple(problems)
