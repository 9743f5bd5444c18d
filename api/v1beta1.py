"""The opaque configuration that users write, field by field as NVIDIA's driver has it.

A field that NVIDIA's driver lacks stands last and says so. The API is
``resource.nvidia.com/v1beta1``. Unknown fields are errors, and so are the fields of another
strategy than the chosen one: what the type excludes needs no further check. ``api.decode`` turns
raw parameters into these.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from api.strict import Strict

QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
"""A positive Kubernetes quantity (k8s.io/apimachinery/pkg/api/resource): ``10Gi``, ``500M``,
``1e9``."""

_LONGEST_QUANTITY = 64  # characters; the API server writes 30 at most
_MOST_DEVICES = 64  # twice what a claim can be allocated: each by its UUID, and by its index

Quantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, max_length=_LONGEST_QUANTITY)]


class TimeSlicingConfig(Strict):
    """How long a process runs before the next one has its turn. An empty one means ``Default``."""

    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class TimeSlicing(Strict):
    """Processes take turns. Without a configuration: at whatever interval the GPU has."""

    strategy: Literal["TimeSlicing"]
    time_slicing_config: TimeSlicingConfig | None = None


class MpsConfig(Strict):
    """Limits of the clients of one MPS server."""

    default_active_thread_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: dict[str, Quantity] = Field(
        default_factory=dict, max_length=_MOST_DEVICES
    )  # by UUID, or index of the UUID-sorted GPUs
    multi_user: bool | None = None
    client_priority: Literal["Normal", "BelowNormal"] = "Normal"  # NVIDIA's driver lacks it


class Mps(Strict):
    """Processes run at the same time under CUDA's Multi-Process Service."""

    strategy: Literal["MPS"]
    mps_config: MpsConfig = MpsConfig()


class MigTimeSlicing(Strict):
    """On a MIG device: accepted, without effect, as in NVIDIA's driver."""

    strategy: Literal["TimeSlicing"]


def _strategy(sharing: Any) -> str | None:
    """What tells the strategies apart. pydantic's own way writes out whatever stands there instead
    of a word, nested lists included."""
    strategy = sharing.get("strategy") if isinstance(sharing, dict) else None
    return strategy if isinstance(strategy, str) else None


_MPS = Annotated[Mps, Tag("MPS")]
_Sharing = Annotated[Annotated[TimeSlicing, Tag("TimeSlicing")] | _MPS, Discriminator(_strategy)]
_MigSharing = Annotated[
    Annotated[MigTimeSlicing, Tag("TimeSlicing")] | _MPS, Discriminator(_strategy)
]


class GpuConfig(Strict):
    """Configuration of a whole GPU."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["GpuConfig"]
    sharing: _Sharing | None = None


class MigDeviceConfig(Strict):
    """Configuration of a MIG device."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["MigDeviceConfig"]
    sharing: _MigSharing | None = None


class Iommu(Strict):
    """Which IOMMU interface a virtual machine monitor is given."""

    backend_policy: Literal["LegacyOnly", "PreferIommuFD"] = "LegacyOnly"
    enable_api_device: Annotated[bool, Field(alias="enableAPIDevice")] = False


class VfioDeviceConfig(Strict):
    """Configuration of a GPU that is passed through to a virtual machine."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["VfioDeviceConfig"]
    iommu: Iommu = Iommu()


Config = GpuConfig | MigDeviceConfig | VfioDeviceConfig
KINDS: dict[str, type[GpuConfig] | type[MigDeviceConfig] | type[VfioDeviceConfig]] = {
    "GpuConfig": GpuConfig,
    "MigDeviceConfig": MigDeviceConfig,
    "VfioDeviceConfig": VfioDeviceConfig,
}
