"""Named layouts: the partitions that GPUs get once, for claims to find."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import StrEnum

from dra_driver.base.frozen import frozen, ordered
from dra_driver.model.gpus import GpuUuid, PartitionKey

ProfileCounts = tuple[tuple[str, int], ...]
"""How many partitions of each profile, by its name."""


@frozen
class MigLayoutEntry:
    """What becomes of the GPUs that it selects."""

    on: bool  # MIG mode
    counts: ProfileCounts = ()
    indexes: frozenset[int] | None = None  # places in the order of the PCI bus; None: any
    pci_ids: frozenset[int] = frozenset()  # device and vendor; empty: any
    gpus: frozenset[GpuUuid] | None = None  # None: whichever there are


@frozen
class MigLayout:
    """Of the entries that select a GPU the last one holds for it, as mig-parted would leave it. A
    GPU that none selects stays as it is."""

    name: str
    entries: tuple[MigLayoutEntry, ...]
    where: str = "built in"  # which file it is from


@frozen
class DesiredLayout:
    """What one GPU should look like, and why."""

    layout: str
    on: bool
    counts: ProfileCounts = ()


@ordered
class LayoutInstance:
    """An instance that a layout made or took over, and what it is known by: another one can come to
    its place."""

    key: PartitionKey
    gi: int | None = None  # GPU instance id; None: it is being made
    uuid: str = ""


@frozen
class LayoutBefore:
    """What a GPU looked like before a change of it began."""

    on: bool
    keys: tuple[PartitionKey, ...] = ()


@frozen
class LayoutChange:
    """What makes of a GPU what is wanted, in this order."""

    gpu: GpuUuid
    remove: tuple[PartitionKey, ...] = ()
    switch: bool | None = None  # to which MIG mode; None: it has it
    create: tuple[PartitionKey, ...] = ()
    keep: tuple[PartitionKey, ...] = ()  # of those that layouts made or took over

    @property
    def managed(self) -> tuple[PartitionKey, ...]:
        """What layouts have made or taken over, once it is done."""
        return tuple(sorted({*self.keep, *self.create}))

    @property
    def is_nothing(self) -> bool:
        return not self.remove and not self.create and self.switch is None


class LayoutState(StrEnum):
    """How far a layout is; the values of the label ``names.MIG_STATE_LABEL``."""

    PENDING = "pending"  # it waits until nothing uses the GPU
    SUCCESS = "success"
    FAILED = "failed"


@frozen
class LayoutOutcome:
    """What came of the layout of one GPU."""

    layout: str
    state: LayoutState
    reason: str = ""  # what it waits for, or why it failed


@frozen
class MigState:
    """What has to be remembered of what was made of GPUs other than for claims."""

    instances: Mapping[GpuUuid, tuple[LayoutInstance, ...]] = field(default_factory=dict)
    # of changes that are under way
    before: Mapping[GpuUuid, LayoutBefore] = field(default_factory=dict)
    switched: tuple[GpuUuid, ...] = ()  # boards that were put into MIG mode to offer partitions
    left_on: tuple[GpuUuid, ...] = ()  # those that a claim put into MIG mode, until they leave it
    outcomes: Mapping[GpuUuid, LayoutOutcome] = field(default_factory=dict)
    # what else is not as it should be
    mode_problems: Mapping[GpuUuid, str] = field(default_factory=dict)
    problem: str = ""  # why it is not known what GPUs should look like: there is no such layout
    state: LayoutState | None = None  # of all layouts together; None: none is wanted
    labelled: bool = False  # whether the state on the Node may be one that we wrote
    label: str | None = None  # which layout the Node's label named last; None: that is not known

    @property
    def keys(self) -> Mapping[GpuUuid, tuple[PartitionKey, ...]]:
        """Where layouts made something."""
        return {
            gpu: tuple(instance.key for instance in instances)
            for gpu, instances in self.instances.items()
        }

    @property
    def failures(self) -> int:
        """How much is not as it should be, and does not just wait."""
        failed = [
            outcome for outcome in self.outcomes.values() if outcome.state is LayoutState.FAILED
        ]
        return len(failed) + len(self.mode_problems) + bool(self.problem)


def overall_state(outcomes: Iterable[LayoutOutcome]) -> LayoutState:
    """All of them together: the worst counts."""
    states = {outcome.state for outcome in outcomes}
    order = (LayoutState.FAILED, LayoutState.PENDING)
    return next((state for state in order if state in states), LayoutState.SUCCESS)
