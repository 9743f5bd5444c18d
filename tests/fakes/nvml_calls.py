"""The functions of NVML by when the plugin calls them where partitions change, for tests that kill
it at each of them."""

OF_NO_GPU = frozenset(
    {
        "nvmlDeviceGetCount",
        "nvmlInit",
        "nvmlShutdown",
        "nvmlSystemGetCudaDriverVersion",
        "nvmlSystemGetDriverVersion",
    }
)
"""Called whenever NVML is started, or before a look."""

AT_A_LOOK = frozenset(
    {
        "nvmlDeviceGetAddressingMode",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetBrand",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetGpuInstancePossiblePlacements",
        "nvmlDeviceGetGpuInstanceProfileInfo",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetName",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetVirtualizationMode",
    }
)
"""Called at the first look at a GPU without partitions, and so at each start."""

AT_WORK = frozenset(
    {
        "nvmlComputeInstanceGetInfo_v2",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetGpuInstanceById",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetGpuInstances",
        "nvmlDeviceGetHandleByUUID",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlGpuInstanceGetInfo",
    }
)
"""Called besides while a partition is created or removed, for a claim or by a layout."""

BEFORE_A_LAYOUT = frozenset(
    {
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    }
)
"""Called to see that nobody uses what a layout changes."""

CREATES = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
)
"""What changes a GPU as a partition comes, in order."""

REMOVES = ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "nvmlDeviceSetMigMode")
"""What changes a GPU as a partition goes, in order."""

CHANGES = frozenset({*CREATES, *REMOVES})

FOR_OTHERS = {
    "nvmlDeviceGetComputeRunningProcesses_v2": "of a library before driver 510",
    "nvmlDeviceGetGraphicsRunningProcesses_v2": "of a library before driver 510",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2": "of a library before driver 510",
    "nvmlDeviceGetPersistenceMode": "of a GPU whose MIG mode was not switched",
    "nvmlDeviceGetComputeMode": "of a GPU that is shared by MPS as a whole",
    "nvmlDeviceSetComputeMode": "of a GPU that is shared by MPS as a whole",
    "nvmlDeviceGetMemoryLimits_v1": "of a driver that limits memory by cgroup, not with MIG",
    "nvmlDeviceSetMemoryLimits_v1": "of a driver that limits memory by cgroup, not with MIG",
    "nvmlDeviceGetNvLinkRemoteDeviceType": "of a GPU with NVLink, at a look",
    "nvmlDeviceGetNvLinkRemotePciInfo": "of a GPU with NVLink, at a look",
    "nvmlDeviceGetMaxMigDeviceCount": "of an instance that NVML does not find by its place",
    "nvmlDeviceGetMigDeviceHandleByIndex": "of an instance that NVML does not find by its place",
    "nvmlDeviceGetRemappedRows": "at a look at health, which changes nothing",
    "nvmlDeviceGetFieldValues": "at a look at health, which changes nothing",
    "nvmlDeviceGetCurrentClocksEventReasons": "at a look at health, which changes nothing",
    "nvmlDeviceGetGpuFabricInfoV": "at a look at health, which changes nothing",
    "nvmlDeviceGetSupportedEventTypes": "by the thread that waits for events",
    "nvmlDeviceRegisterEvents": "by the thread that waits for events",
    "nvmlEventSetCreate": "by the thread that waits for events",
    "nvmlEventSetWait_v2": "by the thread that waits for events",
    "nvmlEventSetFree": "by the thread that waits for events",
}
"""Not called for any of this; of what else."""
