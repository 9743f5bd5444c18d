"""Every name that other programs read, each string once.

Names without a domain live in the driver's own domain (KEP-4381). They are those of NVIDIA's
driver, so that claims, selectors and exporters written for it work as they are; ours are added at
the end of each list.
"""

from typing import Final

DRIVER: Final = "gpu.nvidia.com"
CONFIG_GROUP: Final = "resource.nvidia.com"
CONFIG_VERSION: Final = f"{CONFIG_GROUP}/v1beta1"
NODE_PROFILES_PATH: Final = f"/apis/{CONFIG_VERSION}/nodeprofiles"

# Device types: the value of the attribute "type".
TYPE_GPU: Final = "gpu"
TYPE_MIG: Final = "mig"  # a partition
TYPE_GPU_SHARED: Final = "gpu-shared"  # where a profile renames GPUs that it divides
TYPE_GPU_MONITOR: Final = "gpu-monitor"  # for admin access only

# Attributes.
TYPE: Final = "type"
UUID: Final = "uuid"
PRODUCT_NAME: Final = "productName"
BRAND: Final = "brand"
ARCHITECTURE: Final = "architecture"
CUDA_COMPUTE_CAPABILITY: Final = "cudaComputeCapability"
DRIVER_VERSION: Final = "driverVersion"
CUDA_DRIVER_VERSION: Final = "cudaDriverVersion"
ADDRESSING_MODE: Final = "addressingMode"
PARENT_UUID: Final = "parentUUID"  # of a partition: its GPU
PROFILE: Final = "profile"  # of a partition: "1g.10gb"

# Attributes of Kubernetes' own domain (KEP-4381, KEP-6072).
PCI_BUS_ID: Final = "resource.kubernetes.io/pciBusID"
PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
NUMA_NODE: Final = "resource.kubernetes.io/numaNode"

# Attributes that NVIDIA's driver lacks.
NVLINK_CLIQUE: Final = "nvlinkClique"  # string: the same where GPUs reach each other by NVLink
NVLINK_PEERS: Final = "nvlinkPeers"  # int: how many other GPUs of this node
PCIE_SWITCH: Final = "pcieSwitch"  # string: bus id of the nearest port that others share
TIME_SLICING: Final = "timeSlicing"  # bool: claims can share it by taking turns
MPS: Final = "mps"  # bool: claims can share it by MPS
AS_GPU: Final = "asGpu"  # bool, true where it is there: one that serves claims for a GPU

# Capacities.
MEMORY: Final = "memory"
MULTIPROCESSORS: Final = "multiprocessors"  # this and the next ones: of partitions
COPY_ENGINES: Final = "copyEngines"
DECODERS: Final = "decoders"
ENCODERS: Final = "encoders"
JPEG_ENGINES: Final = "jpegEngines"
OFA_ENGINES: Final = "ofaEngines"
MEMORY_SLICE: Final = "memorySlice"  # with a number: a partition that exists has this one
CORES: Final = "cores"  # percent of the SMs that are reserved
SHARES: Final = "shares"  # how many claims at once

# In the metadata that a container can read, beside the attributes of its device.
STRATEGY: Final = "strategy"  # string: how a share is shared, TimeSlicing or MPS

# Taints.
MONITOR_TAINT: Final = "gpu.nvidia.com/monitor"

# Labels of a Node that choose its profile; the first one that has a value counts.
PROFILE_LABEL: Final = "gpu.nvidia.com/profile"
DEVICE_PLUGIN_CONFIG_LABEL: Final = "nvidia.com/device-plugin.config"  # as NVIDIA's plugin has it

# Of the controller: the annotation of a Node that says which revision of a NodeProfile it gets ("":
# none holds there), the condition of a Node in which the plugin says what became of it, and the
# label of a ControllerRevision that names its profile.
PROFILE_REVISION_ANNOTATION: Final = "gpu.nvidia.com/profile-revision"
GPUS_CONFIGURED: Final = "GPUsConfigured"
GPUS_ALLOCATED_BY: Final = "GPUsAllocatedBy"  # the condition that says by which API, and why
REVISION_PROFILE_LABEL: Final = f"{CONFIG_GROUP}/node-profile"

# The annotation of a Node by which an administrator says which GPUs are well again: "gpu-0,gpu-3",
# or "all". The plugin removes it once it has acted on it.
CLEAR_FAULTS_ANNOTATION: Final = "gpu.nvidia.com/clear-faults"

# The annotation of a Node by which an administrator has the driver let go of GPUs for a while:
# "gpu-0,gpu-3 2026-11-24T03:00:00Z", or "all" with a time; and the one in which the plugin says
# that it did. NVIDIA's GPU operator has "paused-for-…" in these labels while it changes the driver.
RELEASE_ANNOTATION: Final = "gpu.nvidia.com/release"
RELEASED_ANNOTATION: Final = "gpu.nvidia.com/released"
PAUSE_LABELS: Final = ("nvidia.com/gpu.deploy.dra-driver", "nvidia.com/gpu.deploy.device-plugin")

# The annotation in which the plugin says for commands what pods ask for by the device-plugin API,
# and who has GPUs of this driver beside another device plugin: a document of base.codec.
DEVICE_PLUGIN_ANNOTATION: Final = "gpu.nvidia.com/device-plugin"

# Labels of a Node as NVIDIA's MIG manager has them: the layout that is wanted, and how far it is.
MIG_CONFIG_LABEL: Final = "nvidia.com/mig.config"
MIG_STATE_LABEL: Final = "nvidia.com/mig.config.state"

# CDI: the kind under which a claim's devices are named, as NVIDIA's driver does.
CDI_CLASS: Final = "claim"
CDI_DRIVER_CLASS: Final = "driver"  # what containers get of the installed driver
CDI_DRIVER_DEVICE: Final = "files"
