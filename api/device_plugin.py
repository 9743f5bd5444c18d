"""The configuration file of NVIDIA's device plugin, ``version: v1``, field by field as it has it.

Most of it says how that plugin speaks with the kubelet. What has no meaning for this driver is read
all the same; its description says what there is instead, and ``unused`` finds what a file has of
it.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from api.strict import StrictModel, all_defaults, field_path

_BY_CDI = (
    "containers get their devices by CDI; by the device-plugin API before Kubernetes 1.29 file by "
    "file"
)
_BY_UUID = "containers and the kubelet know devices by UUID"
_HOOKS = "containers are edited without hooks, unless --nvidia-cdi-hook names a program for them"
_NO_LABELS = "no labels are written on nodes; by DRA, what they said are attributes of devices"
_NO_HEALTH = "what follows from an XID or an ECC error says the section health of a NodeProfile"
_NO_IMEX = "no IMEX channels are handed out"
_NAMES = (
    "as with NVIDIA's plugin; the names that pods ask for are values of the chart "
    "(extendedResourceName)"
)


def _unused(why: str, alias: str | None = None, default: Any = None) -> Any:
    return Field(default=default, description=why, alias=alias)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("should be a duration, like 60s")
    return value


def _devices(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value != "all" and not number and not _is_list_of_devices(value):
        raise ValueError("should be all, a number, or a list of indices and UUIDs")
    return value


def _is_list_of_devices(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str | int) and not isinstance(each, bool) for each in value
    )


def _xids(value: Any) -> Any:
    numbers = isinstance(value, list) and all(type(each) is int for each in value)
    if not numbers and not (isinstance(value, str) and value.lower() == "all"):
        raise ValueError("should be all, or a list of numbers")
    return value


Duration = Annotated[Any, AfterValidator(_duration)]
Strategies = Annotated[
    list[Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]], BeforeValidator(_listed)
]


class PluginFlags(StrictModel):
    """Of the plugin alone."""

    pass_device_specs: bool | None = _unused("containers always get their device files")
    device_list_strategy: Strategies | None = _unused(_BY_CDI)
    device_id_strategy: Literal["uuid", "index"] | None = _unused(_BY_UUID, "deviceIDStrategy")
    cdi_annotation_prefix: str | None = _unused("CDI names are handed over without annotations")
    nvidia_ctk_path: str | None = _unused(_HOOKS, "nvidiaCTKPath")
    container_driver_root: str | None = _unused("where the host's files are seen is --host-root")
    kubelet_socket: str | None = _unused(
        "the kubelet is found by --kubelet-dir and --device-plugin-dir"
    )
    cdi_feature_flags: str | None = _unused(_BY_CDI)
    shared_devices_allocation_policy: Literal["distributed", "packed"] | None = None


class GfdFlags(StrictModel):
    """Of GPU feature discovery alone."""

    oneshot: bool | None = _unused(_NO_LABELS)
    no_timestamp: bool | None = _unused(_NO_LABELS)
    sleep_interval: Duration = _unused(_NO_LABELS)
    output_file: str | None = _unused(_NO_LABELS)
    machine_type_file: str | None = _unused(_NO_LABELS)


class Flags(StrictModel):
    """What can be given on the plugin's command line too."""

    mig_strategy: Literal["none", "single", "mixed"] | None = None
    fail_on_init_error: bool | None = _unused(
        "a node whose GPUs cannot be read keeps running, is not ready and says why"
    )
    mps_root: str | None = _unused("where MPS keeps its files is --mps-dir of its agent")
    nvidia_driver_root: str | None = _unused("the driver is looked for, or named by --driver-root")
    nvidia_dev_root: str | None = _unused("device files are looked for where the driver is")
    gdrcopy_enabled: bool | None = _unused("containers get no device files of GDRCopy")
    gds_enabled: bool | None = _unused("containers get no device files of GPUDirect Storage")
    mofed_enabled: bool | None = _unused("containers get no device files of InfiniBand")
    use_node_feature_api: bool | None = _unused(_NO_LABELS, "useNodeFeatureAPI")
    device_discovery_strategy: str | None = _unused("GPUs are found by NVML")
    plugin: PluginFlags | None = None
    gfd: GfdFlags | None = None


class NamedResource(StrictModel):
    """Another name for the GPUs of some product."""

    pattern: str
    name: str


class Resources(StrictModel):
    """Other names for resources."""

    gpus: list[NamedResource] | None = _unused(_NAMES)
    mig: list[NamedResource] | None = _unused(_NAMES)


class ReplicatedResource(StrictModel):
    """What each GPU that is known under this name is divided into."""

    name: str
    rename: str | None = _unused(_NAMES)
    devices: Annotated[Any, AfterValidator(_devices)] = _unused(
        "all GPUs of the node are shared alike, as by NVIDIA's plugin; a NodeProfile can tell "
        "them apart",
        default="all",
    )
    replicas: Annotated[int, Field(ge=2)]  # as NVIDIA's plugin: one is no sharing


class ReplicatedResources(StrictModel):
    """One way to share."""

    rename_by_default: bool = False
    fail_requests_greater_than_one: bool | None = None
    resources: Annotated[list[ReplicatedResource], Field(min_length=1)]


class Sharing(StrictModel):
    """One of the two at most."""

    time_slicing: ReplicatedResources | None = None
    mps: ReplicatedResources | None = None


class Imex(StrictModel):
    """Channels between nodes."""

    channel_ids: list[Literal[0]] | None = _unused(_NO_IMEX, "channelIDs")
    required: bool | None = _unused(_NO_IMEX)


class HealthConfig(StrictModel):
    """What makes a GPU unhealthy."""

    disabled: bool | None = _unused(_NO_HEALTH)
    event_types: list[str] | None = _unused(_NO_HEALTH)
    ignored_xids: list[int] | None = _unused(_NO_HEALTH, "ignoredXIDs")
    critical_xids: Annotated[Any, AfterValidator(_xids)] = _unused(_NO_HEALTH, "criticalXIDs")


class DevicePluginConfig(StrictModel):
    """One file."""

    version: Literal["v1"] = "v1"
    flags: Flags = all_defaults(Flags)
    resources: Resources = all_defaults(Resources)
    sharing: Sharing = all_defaults(Sharing)
    imex: Imex = all_defaults(Imex)
    health: HealthConfig = all_defaults(HealthConfig)


def unused(part: StrictModel, path: str = "") -> Iterator[tuple[str, str]]:
    """The path of every field in *part* that has no meaning here, and why, in the order of the
    fields."""
    for name, about in type(part).model_fields.items():
        value = getattr(part, name)
        where = field_path(path, about.alias or name)
        if isinstance(value, StrictModel):
            yield from unused(value, where)
        elif isinstance(value, list) and not about.description:
            for number, each in enumerate(value):
                yield from unused(each, field_path(where, number))
        elif about.description and value != about.default:
            yield where, about.description
