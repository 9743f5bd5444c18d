"""Who has how much of which GPU and partition: the ledger's records, GPU by GPU."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import DeviceName, Gpu, GpuUuid, Partition, PartitionKey
from dra_driver.model.offer import Fractional, Replica, partition_name
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import SetTimeSlice, TimeSliceInterval
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.plan.prepare.amounts import NO_AMOUNT, Amount, requested_amount


@frozen
class HeldDevice:
    """One device of a GPU that one claim has. A claim can have several of one GPU."""

    record: ClaimRecord
    holding: Holding

    @property
    def amount(self) -> Amount:
        """What it takes away from others; admin access takes nothing."""
        if self.holding.admin:
            return NO_AMOUNT
        return requested_amount(self.holding.consumed, self.holding.shape)

    @property
    def interval(self) -> TimeSliceInterval | None:
        """The time slice that the claim asked for, if it did."""
        steps = (s for s in self.record.steps if isinstance(s, SetTimeSlice))
        return next((s.interval for s in steps if s.gpu == self.holding.gpu), None)


@frozen
class GpuUsage:
    """One GPU, or one partition of it, and who uses it."""

    name: str
    gpu: Gpu | None  # None: it was not read, or is gone
    held_devices: tuple[HeldDevice, ...] = ()  # of a GPU: of it as a whole
    key: PartitionKey | None = None  # None: it is a GPU
    parts: tuple["GpuUsage", ...] = ()  # of a GPU: those that a claim holds, or that are there
    uncertain: bool = False  # a claim whose record cannot be read may hold it, too

    @property
    def uuid(self) -> GpuUuid | None:
        """Of the GPU or of the instance. None: not known, or not created yet."""
        if self.key is not None:
            return self._instance
        if self.gpu is not None:
            return self.gpu.uuid
        return next((device.holding.gpu for device in self.all_held if device.holding.gpu), None)

    @property
    def all_held(self) -> Iterator[HeldDevice]:
        """Also those on its partitions."""
        yield from self.held_devices
        for part in self.parts:
            yield from part.held_devices

    @property
    def claims(self) -> Iterable[ClaimRecord]:
        """Every claim once, admin access included, also those on partitions."""
        return {device.record.claim.uid: device.record for device in self.all_held}.values()

    @property
    def partition(self) -> Partition | None:
        """None: it is a GPU, or its profile is not known."""
        mig = self.gpu.mig if self.gpu else None
        return mig.partition(self.key) if mig and self.key else None

    @property
    def memory_bytes(self) -> int | None:
        """All its memory, as far as that is known: of a GPU that was not looked at, what was
        divided among claims."""
        if self.partition is not None:
            return self.partition.profile.memory_bytes
        if self.gpu is not None and self.key is None:
            return self.gpu.memory_bytes
        divided = (_divided(device.holding) for device in self.held_devices)
        return next(filter(None, divided), None)

    @property
    def held(self) -> Amount:
        """Without what is held of its partitions."""
        return sum((device.amount for device in self.held_devices), NO_AMOUNT)

    @property
    def held_bytes(self) -> int | None:
        """None: it is not known, or all of it, and how much that is is not known."""
        if self.uncertain:
            return None
        held = self.held
        own = self.memory_bytes if held.whole else held.memory_bytes
        return known_sum((own, *(part.held_bytes for part in self.parts)))

    @property
    def partitioned_bytes(self) -> int:
        """The memory of its partitions, held or not."""
        return sum(part.memory_bytes or 0 for part in self.parts)

    @property
    def free_bytes(self) -> int | None:
        """Neither held nor in a partition. None: not known."""
        if self.held.whole:
            return 0
        if self.memory_bytes is None or self.uncertain:
            return None
        return max(0, self.memory_bytes - self.held.memory_bytes - self.partitioned_bytes)

    @property
    def shares(self) -> int | None:
        """How many claims can be on it at once; None: it is not shared."""
        for device in self.held_devices:
            match device.holding.shape:
                case Fractional(shares=most) | Replica(of=most):
                    return most
        return None

    @property
    def _instance(self) -> GpuUuid | None:
        existing = self.gpu.mig.instances if self.gpu and self.gpu.mig else ()
        recorded = (device.holding.instance for device in self.held_devices)
        instances = (*existing, *recorded)
        return next((each.uuid for each in instances if each and each.key == self.key), None)


def gpu_usages(
    records: Iterable[ClaimRecord],
    gpus: Iterable[Gpu],
    unreadable: Collection[DamagedRecord] = (),
) -> tuple[GpuUsage, ...]:
    """The *gpus* of the node, and those that only *records* name; by minor number. On each,
    claims by namespace and name, those with admin access last. *unreadable*: each makes it
    uncertain what is free of the GPUs that its claim may hold."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    held_devices: dict[GpuUuid, dict[PartitionKey | None, list[HeldDevice]]] = defaultdict(
        lambda: defaultdict(list)
    )
    names: dict[GpuUuid, str] = {}
    current_names = {uuid: str(gpu.name) for uuid, gpu in by_uuid.items()}
    for record in sorted(records, key=lambda record: record.claim):
        for holding in record.holdings:
            held_devices[holding.gpu][holding.partition].append(HeldDevice(record, holding))
            # A GPU can get another name within a boot, and its old one can be another GPU's.
            is_reused = holding.gpu_name in current_names.values()
            names[holding.gpu] = str(holding.gpu) if is_reused else holding.gpu_name
    names |= current_names
    return tuple(
        _usage(
            names[uuid],
            by_uuid.get(uuid),
            held_devices[uuid],
            uncertain=any(
                damaged.may_hold(uuid, DeviceName(names[uuid])) for damaged in unreadable
            ),
        )
        for uuid in sorted(names, key=lambda uuid: _minor(names[uuid]))
    )


def _usage(
    name: str,
    gpu: Gpu | None,
    held_devices: Mapping[PartitionKey | None, list[HeldDevice]],
    uncertain: bool,
) -> GpuUsage:
    existing = [instance.key for instance in gpu.mig.instances] if gpu and gpu.mig else []
    keys = sorted(
        {key for key in (*held_devices, *existing) if key is not None},
        key=lambda key: (key.start, key),
    )
    parts = tuple(
        replace(_partition_usage(gpu, key, held_devices.get(key, [])), uncertain=uncertain)
        for key in keys
    )
    whole = _admin_access_last(held_devices.get(None, []))
    return GpuUsage(name, gpu, whole, parts=parts, uncertain=uncertain)


def _partition_usage(
    gpu: Gpu | None, key: PartitionKey, held_devices: list[HeldDevice]
) -> GpuUsage:
    partition = gpu.mig.partition(key) if gpu and gpu.mig else None
    if gpu and partition:
        name = str(partition_name(gpu, partition))
    else:
        name = held_devices[0].holding.unit if held_devices else str(key)
    return GpuUsage(name, gpu, _admin_access_last(held_devices), key)


def _admin_access_last(held_devices: Iterable[HeldDevice]) -> tuple[HeldDevice, ...]:
    return tuple(sorted(held_devices, key=lambda device: device.holding.admin))


def known_sum(sizes: Iterable[int | None]) -> int | None:
    """None: one of them is not known."""
    known_and_unknown = list(sizes)
    known = [size for size in known_and_unknown if size is not None]
    return sum(known) if len(known) == len(known_and_unknown) else None


def _divided(holding: Holding) -> int:
    match holding.shape:
        case Fractional(memory_default=part, replicas=number):
            return part * number
        case Replica(memory_bytes=part, of=number):
            return (part or 0) * number
    return 0


def _minor(name: str) -> tuple[int, str]:
    number = name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1, name)
