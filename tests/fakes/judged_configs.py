"""Opaque configurations, thirty and more that are right, and as many that are wrong."""

from typing import Any

VERSION = "resource.nvidia.com/v1beta1"
PER_DEVICE = "defaultPerDevicePinnedMemoryLimit"


def gpu(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "GpuConfig", **fields}


def mig(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "MigDeviceConfig", **fields}


def vfio(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": "VfioDeviceConfig", **fields}


def turns(**fields: Any) -> dict[str, Any]:
    return gpu(sharing={"strategy": "TimeSlicing", **fields})


def interval(word: Any) -> dict[str, Any]:
    return turns(timeSlicingConfig={"interval": word})


def mps(**limits: Any) -> dict[str, Any]:
    return gpu(sharing={"strategy": "MPS", "mpsConfig": limits})


def per_device(**limits: Any) -> dict[str, Any]:
    return mps(defaultPerDevicePinnedMemoryLimit=limits)


def memory(quantity: Any) -> dict[str, Any]:
    return mps(defaultPinnedDeviceMemoryLimit=quantity)


KINDS_KNOWN = "write GpuConfig, MigDeviceConfig or VfioDeviceConfig"
STRATEGIES = "write TimeSlicing or MPS"
QUANTITY = "write a quantity of 256Mi or more, for example 10Gi"
INTERVALS = "write Default, Short, Medium or Long"
LIMITS = (
    "known are defaultActiveThreadPercentage, defaultPinnedDeviceMemoryLimit, "
    f"{PER_DEVICE}, multiUser and clientPriority"
)
OTHER_STRATEGY = "remove it, or change the strategy"
MPS = ".sharing.mpsConfig"

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {},
        f".apiVersion: missing; write {VERSION}; .kind: missing; {KINDS_KNOWN}",
    ),
    "no version": ({"kind": "GpuConfig"}, f".apiVersion: missing; write {VERSION}"),
    "another group": (
        gpu(apiVersion="gpu.nvidia.com/v1", colour=1),
        f'.apiVersion: "gpu.nvidia.com/v1" is wrong; write {VERSION}',
    ),
    "a number for a version": (gpu(apiVersion=1), f".apiVersion: 1 is wrong; write {VERSION}"),
    "no kind": ({"apiVersion": VERSION}, f".kind: missing; {KINDS_KNOWN}"),
    "another kind": (gpu(kind="Gpu"), f'.kind: "Gpu" is wrong; {KINDS_KNOWN}'),
    "the name of a part for a kind": (gpu(kind="Mps"), f'.kind: "Mps" is wrong; {KINDS_KNOWN}'),
    "a list for a kind": (gpu(kind=["GpuConfig"]), f".kind: a list is wrong; {KINDS_KNOWN}"),
    "an unknown field": (
        gpu(colour=1),
        ".colour: unknown field; known are apiVersion, kind and sharing",
    ),
    "a misspelt field": (
        gpu(sharin={"strategy": "MPS"}),
        ".sharin: unknown field; known are apiVersion, kind and sharing",
    ),
    "a field that is not to be printed": (
        gpu(**{"co\nlo\x1bur": 1}),
        ".co\\nlo\x1bur: unknown field; known are apiVersion, kind and sharing",
    ),
    "a field of another kind": (
        gpu(iommu={}),
        ".iommu: unknown field; known are apiVersion, kind and sharing",
    ),
    "a word for sharing": (
        gpu(sharing="MPS"),
        '.sharing: "MPS" is wrong; write an object with a strategy',
    ),
    "a list for sharing": (
        gpu(sharing=["MPS"]),
        ".sharing: a list is wrong; write an object with a strategy",
    ),
    "no strategy": (gpu(sharing={}), f".sharing.strategy: missing; {STRATEGIES}"),
    "an unknown strategy": (
        gpu(sharing={"strategy": "Fair", "mpsConfig": {}}),
        f'.sharing.strategy: "Fair" is wrong; {STRATEGIES}',
    ),
    "a strategy in lower case": (
        gpu(sharing={"strategy": "mps"}),
        f'.sharing.strategy: "mps" is wrong; {STRATEGIES}',
    ),
    "MPS with the interval of another strategy": (
        gpu(sharing={"strategy": "MPS", "timeSlicingConfig": {"interval": "Long"}}),
        f".sharing.timeSlicingConfig: unknown field with strategy MPS; {OTHER_STRATEGY}",
    ),
    "time-slicing with the limits of another strategy": (
        turns(mpsConfig={"defaultActiveThreadPercentage": 50}),
        f".sharing.mpsConfig: unknown field with strategy TimeSlicing; {OTHER_STRATEGY}",
    ),
    "an interval for a partition": (
        mig(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}),
        ".sharing.timeSlicingConfig: unknown field; known is strategy",
    ),
    "limits for a time-sliced partition": (
        mig(sharing={"strategy": "TimeSlicing", "mpsConfig": {}}),
        f".sharing.mpsConfig: unknown field with strategy TimeSlicing; {OTHER_STRATEGY}",
    ),
    "an unknown interval": (
        interval("Forever"),
        f'.sharing.timeSlicingConfig.interval: "Forever" is wrong; {INTERVALS}',
    ),
    "a number for an interval": (
        interval(2),
        f".sharing.timeSlicingConfig.interval: 2 is wrong; {INTERVALS}",
    ),
    "a word for an object": (
        turns(timeSlicingConfig="Long"),
        '.sharing.timeSlicingConfig: "Long" is wrong; write an object',
    ),
    "an unknown field beside the interval": (
        turns(timeSlicingConfig={"intervall": "Long"}),
        ".sharing.timeSlicingConfig.intervall: unknown field; known is interval",
    ),
    "too many percent": (
        mps(defaultActiveThreadPercentage=101),
        f"{MPS}.defaultActiveThreadPercentage: 101 is wrong; write a whole number from 0 to 100",
    ),
    "less than no percent": (
        mps(defaultActiveThreadPercentage=-1),
        f"{MPS}.defaultActiveThreadPercentage: -1 is wrong; write a whole number from 0 to 100",
    ),
    "half a percent": (
        mps(defaultActiveThreadPercentage=0.5),
        f"{MPS}.defaultActiveThreadPercentage: 0.5 is wrong; write a whole number from 0 to 100",
    ),
    "percent in quotes": (
        mps(defaultActiveThreadPercentage="50"),
        f'{MPS}.defaultActiveThreadPercentage: "50" is wrong; write a whole number from 0 to 100',
    ),
    "a truth for a percentage": (
        mps(defaultActiveThreadPercentage=True),
        f"{MPS}.defaultActiveThreadPercentage: true is wrong; write a whole number from 0 to 100",
    ),
    "a unit that there is not": (
        memory("10GB"),
        f'{MPS}.defaultPinnedDeviceMemoryLimit: "10GB" is wrong; {QUANTITY}',
    ),
    "memory as a number": (
        memory(10737418240),
        f"{MPS}.defaultPinnedDeviceMemoryLimit: 10737418240 is wrong; {QUANTITY}",
    ),
    "memory of less than nothing": (
        memory("-1Gi"),
        f'{MPS}.defaultPinnedDeviceMemoryLimit: "-1Gi" is wrong; {QUANTITY}',
    ),
    "less memory than a CUDA context takes": (
        memory("255Mi"),
        f'{MPS}.defaultPinnedDeviceMemoryLimit: "255Mi" is wrong; {QUANTITY}',
    ),
    "a quantity that is too long": (
        memory("1" * 65),
        f'{MPS}.defaultPinnedDeviceMemoryLimit: "{"1" * 65}" is wrong; {QUANTITY}',
    ),
    "a limit of one GPU": (
        per_device(**{"0": "1Gi", "GPU-1": "few"}),
        f'{MPS}.{PER_DEVICE}.GPU-1: "few" is wrong; {QUANTITY}',
    ),
    "too many limits": (
        per_device(**{str(number): "1Gi" for number in range(65)}),
        f"{MPS}.{PER_DEVICE}: has 65 keys, more than a claim has GPUs; write one for each",
    ),
    "limits in a list": (
        mps(defaultPerDevicePinnedMemoryLimit=["1Gi"]),
        f"{MPS}.{PER_DEVICE}: a list is wrong; write an object",
    ),
    "a word for a truth": (
        mps(multiUser="yes"),
        f'{MPS}.multiUser: "yes" is wrong; write true or false',
    ),
    "an unknown priority": (
        mps(clientPriority="High"),
        f'{MPS}.clientPriority: "High" is wrong; write Normal or BelowNormal',
    ),
    "an unknown limit": (
        mps(threads=50),
        f"{MPS}.threads: unknown field; {LIMITS}",
    ),
    "two mistakes": (
        mps(threads=50, multiUser=1) | {"colour": {}},
        ".colour: unknown field; known are apiVersion, kind and sharing; "
        f"{MPS}.multiUser: 1 is wrong; write true or false; {MPS}.threads: unknown field; {LIMITS}",
    ),
    "an unknown policy of an IOMMU": (
        vfio(iommu={"backendPolicy": "Newest"}),
        '.iommu.backendPolicy: "Newest" is wrong; write LegacyOnly or PreferIommuFD',
    ),
    "a number for an IOMMU": (vfio(iommu=1), ".iommu: 1 is wrong; write an object"),
}
"""What is wrong, and all that is said of it, with paths from the configuration on."""

RIGHT: dict[str, dict[str, Any]] = {
    "a GPU": gpu(),
    "a GPU, with nulls": gpu(sharing=None, colour=None),
    "time-slicing": turns(),
    "time-slicing, with a null": turns(timeSlicingConfig=None, mpsConfig=None),
    "no interval": turns(timeSlicingConfig={}),
    "a null interval": turns(timeSlicingConfig={"interval": None}),
    **{f"the interval {word}": interval(word) for word in ("Default", "Short", "Medium", "Long")},
    "MPS": gpu(sharing={"strategy": "MPS"}),
    "MPS, with a null": gpu(sharing={"strategy": "MPS", "mpsConfig": None}),
    "MPS without limits": mps(),
    **{f"{part} percent": mps(defaultActiveThreadPercentage=part) for part in (0, 1, 50, 100)},
    **{
        f"memory of {quantity}": memory(quantity)
        for quantity in ("256Mi", "10Gi", "+10Gi", "1.5Gi", ".5Ti", "3.Gi", "1e9", "1E10", "1T")
    },
    "memory of 300 million bytes": memory("300000000"),
    "memory of 500 billion thousandths": memory("500000000000m"),
    "a quantity of 64 characters": memory(f"{'0' * 60}10Gi"),
    "more memory than there is": memory("1e99"),
    "limits of single GPUs": per_device(**{"0": "1Gi", "GPU-1": "2G", "2": None}),
    "as many limits as there may be": per_device(**{str(n): "1Gi" for n in range(64)}),
    "no limits of single GPUs": per_device(),
    "one user": mps(multiUser=False),
    "every limit": mps(
        defaultActiveThreadPercentage=40,
        defaultPinnedDeviceMemoryLimit="10Gi",
        defaultPerDevicePinnedMemoryLimit={"0": "5Gi"},
        multiUser=True,
        clientPriority="BelowNormal",
    ),
    "a partition": mig(),
    "a time-sliced partition": mig(sharing={"strategy": "TimeSlicing"}),
    "a partition under MPS": mig(
        sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 30}}
    ),
    "passthrough": vfio(),
    "passthrough with the old interface": vfio(iommu={"backendPolicy": "LegacyOnly"}),
    "passthrough with the new one": vfio(
        iommu={"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}
    ),
}
