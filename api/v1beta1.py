"""The opaque configuration that users write, field by field as NVIDIA's driver has it.

The API is ``resource.nvidia.com/v1beta1``. Unknown fields are errors, and so are the fields of
another strategy than the chosen one: what the type excludes needs no further check. ``api.decode``
turns raw parameters into these.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$"
"""A positive Kubernetes quantity (k8s.io/apimachinery/pkg/api/resource): ``10Gi``, ``500M``,
``1e9``."""

Quantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN)]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=False
    )


class TimeSlicingConfig(_Model):
    """How long a process runs before the next one has its turn. An empty one means ``Default``."""

    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class TimeSlicing(_Model):
    """Processes take turns on the whole GPU."""

    strategy: Literal["TimeSlicing"]
    time_slicing_config: TimeSlicingConfig = TimeSlicingConfig()


class MpsConfig(_Model):
    """Limits of the clients of one MPS server."""

    default_active_thread_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: dict[
        str, Quantity
    ] = {}  # by UUID, or index of the UUID-sorted GPUs
    multi_user: bool | None = None


class Mps(_Model):
    """Processes run at the same time under CUDA's Multi-Process Service."""

    strategy: Literal["MPS"]
    mps_config: MpsConfig = MpsConfig()


class MigTimeSlicing(_Model):
    """On a MIG device: accepted, without effect, as in NVIDIA's driver."""

    strategy: Literal["TimeSlicing"]


class GpuConfig(_Model):
    """Configuration of a whole GPU."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["GpuConfig"]
    sharing: Annotated[TimeSlicing | Mps, Field(discriminator="strategy")] | None = None


class MigDeviceConfig(_Model):
    """Configuration of a MIG device."""

    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["MigDeviceConfig"]
    sharing: Annotated[MigTimeSlicing | Mps, Field(discriminator="strategy")] | None = None


class Iommu(_Model):
    """Which IOMMU interface a virtual machine monitor is given."""

    backend_policy: Literal["LegacyOnly", "PreferIommuFD"] = "LegacyOnly"
    enable_api_device: Annotated[bool, Field(alias="enableAPIDevice")] = False


class VfioDeviceConfig(_Model):
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
