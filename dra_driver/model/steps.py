"""What has to be done to a node for a claim, as values. Every step can be repeated.

What undoes a step depends on what other claims still need: ``plan.undo`` says it, as steps again.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import PartitionKey
from dra_driver.model.mps import Space, SpaceName


@dataclass(frozen=True, slots=True)
class MakeDeviceNodes:
    """The device files of these GPUs exist. Undone by nothing: the files do no harm, and others may
    use them."""

    minors: tuple[int, ...]


class Interval(IntEnum):
    """How long a process runs before the next has its turn: ``nvidia-smi compute-policy``."""

    DEFAULT = 0
    SHORT = 1
    MEDIUM = 2
    LONG = 3

    def __str__(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True, slots=True)
class SetTimeSlice:
    """The GPU's processes take turns at this interval."""

    gpu: GpuUuid
    interval: Interval
    before: Interval | None = None  # what was found; None: the GPU did not say


@dataclass(frozen=True, slots=True)
class PodLimit:
    """How much of a GPU's memory the processes of one pod may use together."""

    pod: PodUid
    memory_bytes: int | None  # None: as much as there is


@dataclass(frozen=True, slots=True)
class LimitMemory:
    """The GPU's driver refuses these pods more than that (``nvmlDeviceSetMemoryLimits_v1``).

    *strict*: a limit that cannot be set is an error; else a warning, and the memory guard is what
    remains. A pod that is gone needs no limit any more, strict or not.
    """

    gpu: GpuUuid
    pods: tuple[PodLimit, ...]
    strict: bool = False


class ComputeMode(IntEnum):
    """Who may compute on a GPU: ``nvmlComputeMode_t``."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1  # not made any more, and possible to find
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


@dataclass(frozen=True, slots=True)
class SetComputeMode:
    """Only that many processes can compute on the GPU at once."""

    gpu: GpuUuid
    mode: ComputeMode
    before: ComputeMode | None = None  # what was found; None: the GPU did not say


@dataclass(frozen=True, slots=True)
class SetMigMode:
    """MIG mode is on or off: ``nvmlDeviceSetMigMode``. Only for a GPU that changes it without a
    reset, or has it already."""

    gpu: GpuUuid
    on: bool
    before: bool | None = None  # what was found; None: the GPU did not say


Setting = SetTimeSlice | SetComputeMode | SetMigMode
"""What a GPU has one of, and gets back what it was before."""


@dataclass(frozen=True, slots=True)
class ServeMps:
    """The MPS agent serves this space."""

    space: Space


@dataclass(frozen=True, slots=True)
class EndMps:
    """The MPS agent serves the space no longer, and stops a server that has no other."""

    space: SpaceName


@dataclass(frozen=True, slots=True)
class CutPartition:
    """This partition of the GPU exists: a GPU instance at its placement, with a compute instance
    that fills it.

    *new*: no other claim has it, so what is there already is somebody else's, and not to be used.
    That is not recorded, since what was begun before a crash is removed and not gone on with.
    """

    gpu: GpuUuid
    key: PartitionKey
    new: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class RemovePartition:
    """It does not exist, nor half of it: first the compute instance goes, then the GPU instance.

    *uuid*: of the instance that was cut; another one in its place is somebody else's, and stays.
    The driver makes it of the GPU, the place and the kind, so one that came and went unseen cannot
    be told from it. None: it is not known, since a crash came between cutting it and recording it;
    what lies there then is taken for it, but for those in *unless*, which are of other claims.
    """

    gpu: GpuUuid
    key: PartitionKey
    uuid: GpuUuid | None = None
    unless: frozenset[GpuUuid] = frozenset()


Step = (
    MakeDeviceNodes
    | SetTimeSlice
    | LimitMemory
    | SetComputeMode
    | SetMigMode
    | CutPartition
    | RemovePartition
    | ServeMps
    | EndMps
)
"""A union like ``Shape``: a new case makes the type checker list who has to deal with it."""
