"""Which writes turn the existing ResourceSlices of a node into the pool that is wanted.

A pool is all slices of one driver with one pool name. The scheduler uses the newest generation of
a pool, once it has as many slices as each of them says; it sees slices one by one as they are
written, so every step on the way has to be safe too: either one slice changes and the pool stays
whole, or all move to a new generation and the pool is incomplete until the last of them is there.
(k8s.io/dynamic-resource-allocation/resourceslice does the same.)
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dra_driver.base.frozen import frozen
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
_NOTHING_KNOWN: Mapping[str, str] = MappingProxyType({})


@frozen
class SliceContent:
    """One slice: devices, or counter sets (never both, since 1.35), as documents of v1."""

    devices: tuple[Document, ...] = ()
    shared_counters: tuple[Document, ...] = ()


@frozen
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


@frozen
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


@frozen
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
    pool: Pool,
    existing: Sequence[Document],
    owner: SliceOwner,
    stored: Mapping[str, str] = _NOTHING_KNOWN,
) -> SliceWrites:
    """The writes that turn the *existing* slices of *owner* into *pool*; none if they are that.

    Slices of other drivers and nodes are left alone, those of other pools of *owner* are deleted.
    *stored*: what the API server is known to make of a spec (``comparable_spec``) where a feature
    is off; a slice with that is as wanted.
    """
    own = sorted((document for document in existing if _is_at(document, owner)), key=_name)
    in_pool = [document for document in own if _pool(document).get("name") == pool.name]
    generation = max((_generation(document) for document in in_pool), default=0)
    times = taint_times(document["spec"] for document in in_pool)
    specs = [with_taint_times(spec, times) for spec in _specs(pool, owner)]
    reusable = _reusable_slices(in_pool, generation, len(specs))
    changed = [
        index
        for index, spec in enumerate(specs)
        if index not in reusable
        or not (_same(spec, reusable[index], owner, stored) and same_taint_times(spec, times))
    ]
    if len(changed) > 1 or any(index not in reusable for index in changed):
        generation, changed = generation + 1, list(range(len(specs)))
    documents = {
        index: _document(index, _numbered(specs[index], generation), owner, reusable.get(index))
        for index in changed
    }
    kept_names = {_name(document) for document in reusable.values()}
    return SliceWrites(
        delete=tuple(document for document in own if _name(document) not in kept_names),
        update=tuple(document for index, document in documents.items() if index in reusable),
        create=tuple(document for index, document in documents.items() if index not in reusable),
    )


def _parts(items: Sequence[Document], most: int) -> list[tuple[Document, ...]]:
    return [tuple(items[start : start + most]) for start in range(0, len(items), most)]


def _by_counter_set(devices: Sequence[Document], most: int) -> list[tuple[Document, ...]]:
    """Slices of complete groups, where those are not many more than there have to be.

    Each group has as much room as the largest one needs, whatever it needs itself, so that what
    becomes of one does not move those behind it.
    """
    groups = _groups(devices)
    sizes = Counter(_counter_sets(group[0]) for group in groups)
    largest = max(map(len, groups), default=0)
    fewest = _parts(devices, most)
    if largest > most:
        return fewest
    slices: list[list[Document]] = []
    room = 0
    for group in groups:
        # A device apart from the rest of its counter sets, or of none, comes in between.
        sets = _counter_sets(group[0])
        between = len(group) == 1 and not (sets and sizes[sets] == 1)
        needed = 1 if between else largest
        if needed > room:
            slices.append([])
            room = most
        slices[-1].extend(group)
        room -= needed
    too_many = len(slices) > len(fewest) + max(1, len(fewest) // 3)
    return fewest if too_many else [tuple(part) for part in slices]


def _groups(devices: Iterable[Document]) -> list[list[Document]]:
    """Devices side by side that take of the same counter sets, with those in between that take of
    none; each other one of these alone."""
    groups: list[list[Document]] = []
    without_counters: list[Document] = []
    for device in devices:
        sets = _counter_sets(device)
        if not sets:
            without_counters.append(device)
        elif groups and _counter_sets(groups[-1][0]) == sets:
            groups[-1] += [*without_counters, device]
            without_counters = []
        else:
            groups += [*([device] for device in without_counters), [device]]
            without_counters = []
    return [*groups, *([device] for device in without_counters)]


def _counter_sets(device: Document) -> tuple[str, ...]:
    return tuple(consumed["counterSet"] for consumed in device.get("consumesCounters") or ())


def _specs(pool: Pool, owner: SliceOwner) -> list[dict[str, Any]]:
    slices = pool.slices or (SliceContent(),)
    return [
        {
            "driver": owner.driver,
            "nodeName": owner.node,
            "pool": {"name": pool.name, "resourceSliceCount": len(slices)},
            "devices": list(part.devices),
            "sharedCounters": list(part.shared_counters),
        }
        for part in slices
    ]


def _numbered(spec: Document, generation: int) -> dict[str, Any]:
    plain = {key: value for key, value in spec.items() if value != []}
    return {**plain, "pool": {**spec["pool"], "generation": generation}}


def _reusable_slices(pool: Sequence[Document], generation: int, count: int) -> dict[int, Document]:
    """The slices that can stay, by index; the others are of older generations or superfluous."""
    reusable: dict[int, Document] = {}
    for document in pool:
        index = _index(document)
        if index is not None and index < count and _generation(document) == generation:
            reusable.setdefault(index, document)
    return reusable


def _same(spec: Document, existing: Document, owner: SliceOwner, stored: Mapping[str, str]) -> bool:
    desired_spec = comparable_spec(spec)
    return (
        comparable_spec(existing["spec"]) in (desired_spec, stored.get(desired_spec))
        and _pool(existing).get("resourceSliceCount") == spec["pool"]["resourceSliceCount"]
        and owner.owner in (existing["metadata"].get("ownerReferences") or ())
    )


def _document(
    index: int, spec: Document, owner: SliceOwner, existing: Document | None
) -> dict[str, Any]:
    """A new slice, or the *existing* one with our owner and *spec*; labels of others stay on it."""
    metadata: dict[str, Any]
    if existing is None:
        # The API server cuts the prefix of generated names at 58 characters: the index comes first.
        metadata = {"generateName": f"{index:05x}-{owner.driver}-{owner.node}-"[:_MAX_NAME_PREFIX]}
    else:
        metadata = {k: v for k, v in existing["metadata"].items() if k != "managedFields"}
    metadata["ownerReferences"] = [owner.owner]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": dict(spec),
    }


def _is_at(document: Document, owner: SliceOwner) -> bool:
    spec = document.get("spec") or {}
    return (spec.get("driver"), spec.get("nodeName")) == (owner.driver, owner.node)


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
