"""The limits that an MPS server has to enforce, compared with those that it has."""

from collections.abc import Iterable, Mapping

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid, is_mig_uuid
from dra_driver.model.mps import (
    ALL_CORES,
    PROTOCOL_3_DRIVER_VERSION,
    MpsLimits,
    MpsNamespace,
    MpsNamespaceName,
    ServedNamespace,
    mps_server_name,
)

_MIB = 1 << 20
_OF_INSTANCES, PROTOCOL_3 = 2, 3


def protocol_over(gpus: Iterable[GpuUuid], newest: int) -> int:
    """What a server over *gpus* speaks where the driver's *newest* protocol is this one.

    Protocol 3 is not said to work where MIG is on: an instance is served with protocol 2.
    """
    return min(newest, _OF_INSTANCES) if any(map(is_mig_uuid, gpus)) else newest


def served_ahead(
    namespace: MpsNamespace, mps_dir: str, driver_major: int
) -> ServedNamespace | None:
    """What clients of *namespace* will be able to use once the server for everybody is there.

    *mps_dir*: where the agent has its servers. None: it is not known before (protocol 3).
    """
    newest = PROTOCOL_3 if driver_major >= PROTOCOL_3_DRIVER_VERSION else _OF_INSTANCES
    if not mps_dir or namespace.tenant or protocol_over(namespace.gpus, newest) == PROTOCOL_3:
        return None
    directory = f"{mps_dir}/{mps_server_name(namespace.gpus)}"
    return ServedNamespace(namespace, _OF_INSTANCES, f"{directory}/pipe", f"{directory}/shm")


def default_limits(namespaces: Iterable[MpsNamespace]) -> MpsLimits:
    """What a server of protocol 2 grants a client by default: the most that one of its namespaces
    has, or can have by the rules of the node."""
    needed = [
        limits
        for namespace in namespaces
        for limits in (least_limits(namespace), namespace.default_limits)
    ]
    sizes = [limits.memory_bytes for limits in needed if limits.memory_bytes is not None]
    unlimited = len(sizes) < len(needed)
    return MpsLimits(
        max((limits.percent for limits in needed), default=ALL_CORES),
        None if unlimited else max(sizes),
    )


def least_limits(namespace: MpsNamespace) -> MpsLimits:
    """The least that a server of protocol 2 has to grant by default, for the namespace to have its
    limits on each of its GPUs: the environment of a client only lowers."""
    sizes = [size for size in namespace.memory_bytes if size is not None]
    unlimited = len(sizes) < len(namespace.gpus)
    return MpsLimits(namespace.percent, None if unlimited else max(sizes))


def _rounded(limits: MpsLimits) -> MpsLimits:
    """As a daemon may write it: 4.89G for 5000M."""
    size = limits.memory_bytes
    return MpsLimits(limits.percent, None if size is None else size + size // 100)


def describe_limits(limits: MpsLimits) -> str:
    """
    >>> describe_limits(MpsLimits(30, 5 << 30))
    '30 % and 5120 MiB'
    """
    size = limits.memory_bytes
    return f"{limits.percent} % and {'all memory' if size is None else f'{size // _MIB} MiB'}"


@frozen
class NamespaceDifferences:
    """What a server of protocol 3 has that it should not have, or the reverse."""

    unwanted: tuple[MpsNamespaceName, ...] = ()
    missing: tuple[MpsNamespace, ...] = ()
    loose: tuple[tuple[MpsNamespace, MpsLimits], ...] = ()  # with what it has instead


def compare_namespaces(
    expected: Iterable[MpsNamespace], actual: Mapping[MpsNamespaceName, MpsLimits]
) -> NamespaceDifferences:
    """Compare what a server should have with what is there."""
    by_name = {namespace.name: namespace for namespace in expected}
    return NamespaceDifferences(
        tuple(sorted(actual.keys() - by_name.keys())),
        tuple(by_name[name] for name in sorted(by_name.keys() - actual.keys())),
        tuple(
            (by_name[name], actual[name])
            for name in sorted(by_name.keys() & actual.keys())
            if actual[name].exceed(_rounded(by_name[name].limits))
        ),
    )
