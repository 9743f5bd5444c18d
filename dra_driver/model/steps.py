"""What has to be done to a node for a claim, as values. Every step can be repeated.

What undoes a step depends on what other claims still need: ``plan.prepare.claim`` says it, as
steps again.
"""

from collections.abc import Collection
from dataclasses import field
from enum import IntEnum
from typing import Annotated

from dra_driver.base.codec import OneOf
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimUid, PodUid
from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName


@frozen
class PodMemoryShare:
    """Bytes by claim, for each claim that the pod uses and that holds something of the GPU.

    A claim without a number (None) is not limited: it holds all of the GPU.
    """

    pod: PodUid
    gpu: GpuUuid
    claims: tuple[tuple[ClaimUid, int | None], ...]
    strict: bool = False  # one of them may not be without the driver's own limit

    @property
    def memory_bytes(self) -> int | None:
        """What the pod's processes may use together; None: as much as there is."""
        return self.of({claim for claim, _ in self.claims})

    def of(self, used: Collection[ClaimUid]) -> int | None:
        """What a container may use that uses these claims; None: as much as there is."""
        parts = [held for claim, held in self.claims if claim in used]
        return None if None in parts else sum(held for held in parts if held is not None)


class TimeSliceInterval(IntEnum):
    """How long a process runs before the next has its turn: ``nvidia-smi compute-policy``."""

    DEFAULT = 0
    SHORT = 1
    MEDIUM = 2
    LONG = 3

    def __str__(self) -> str:
        return self.name.capitalize()


@frozen
class SetTimeSlice:
    """The GPU's processes take turns at this interval."""

    gpu: GpuUuid
    interval: TimeSliceInterval
    before: TimeSliceInterval | None = None  # what was found; None: the GPU did not say


@frozen
class PodMemoryLimit:
    """How much of a GPU's memory the processes of one pod may use together."""

    pod: PodUid
    memory_bytes: int | None  # None: as much as there is


@frozen
class SetMemoryLimits:
    """The GPU's driver refuses these pods more than that (``nvmlDeviceSetMemoryLimits_v1``).

    *strict*: a limit that cannot be set is an error; else a warning, and the memory guard is what
    remains. A pod that is gone needs no limit any more, strict or not.
    """

    gpu: GpuUuid
    pods: tuple[PodMemoryLimit, ...]
    strict: bool = False


class ComputeMode(IntEnum):
    """Who may compute on a GPU: ``nvmlComputeMode_t``."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1  # not made any more, and possible to find
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


@frozen
class SetComputeMode:
    """Only that many processes can compute on the GPU at once."""

    gpu: GpuUuid
    mode: ComputeMode
    before: ComputeMode | None = None  # what was found; None: the GPU did not say


@frozen
class SetMigMode:
    """MIG mode is on or off: ``nvmlDeviceSetMigMode``. Only for a GPU that changes it without a
    reset, or has it already."""

    gpu: GpuUuid
    on: bool
    before: bool | None = None  # what was found; None: the GPU did not say


SettingValue = TimeSliceInterval | ComputeMode | bool
GpuSetting = SetTimeSlice | SetComputeMode | SetMigMode
"""What a GPU has one of, and gets back what it was before."""


@frozen
class ServeMpsNamespace:
    """The MPS agent serves this namespace."""

    namespace: MpsNamespace


@frozen
class RemoveMpsNamespace:
    """The MPS agent serves the namespace no longer, and stops a server that has no other."""

    namespace: MpsNamespaceName


@frozen
class CreatePartition:
    """This partition of the GPU exists: a GPU instance at its placement, with a compute instance
    that fills it.

    *new*: no other claim has it, so what is there already is somebody else's, and not to be used.
    That is not recorded, since what was begun before a crash is removed and not gone on with.
    """

    gpu: GpuUuid
    key: PartitionKey
    new: bool = field(default=False, compare=False)


@frozen
class RemovePartition:
    """It does not exist, nor half of it: first the compute instance goes, then the GPU instance.

    *uuid*: of the instance that was created; another one in its place is somebody else's and stays.
    NVIDIA's driver makes it of GPU, place and profile, so an equal instance that came later has the
    same. None: it is not known, since a crash came between creating and recording the instance;
    then whatever is there is removed, but for those in *unless*, which are of other claims.
    """

    gpu: GpuUuid
    key: PartitionKey
    uuid: GpuUuid | None = None
    unless: frozenset[GpuUuid] = frozenset()


Step = Annotated[
    SetTimeSlice
    | SetMemoryLimits
    | SetComputeMode
    | SetMigMode
    | CreatePartition
    | RemovePartition
    | ServeMpsNamespace
    | RemoveMpsNamespace,
    OneOf(),
]
"""A union like ``Shape``: a new case makes the type checker list who has to deal with it."""
