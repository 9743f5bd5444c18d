"""Whether what NodeProfiles publish slows the scheduler of the cluster down."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from api.strict import ConfigError
from dra_driver.model.node_profiles import NodeProfileObject
from dra_driver.plan.profiles.revisions import decode_rules

MANY_NODES: Final = 20
"""With so many nodes of 200, kube-scheduler placed 3.7 pods a second instead of 93
(docs/performance.md)."""

_FIXED_IN: Final = 37  # the minor version of Kubernetes; kubernetes#138917


def slow_scheduler_warnings(
    profiles: Iterable[NodeProfileObject],
    nodes: Mapping[str, Sequence[object]],
    minor_version: int | None,
) -> Mapping[str, str]:
    """Why each of *profiles* slows the scheduler down, by name, of those that do.

    *nodes*: those that each holds for. *minor_version*: of the API server; None: not known.
    """
    if minor_version is None or minor_version >= _FIXED_IN:
        return {}
    creating = [each.name for each in profiles if creates_partitions(each.name, each.rules)]
    number = sum(len(nodes.get(name, ())) for name in creating)
    if number < MANY_NODES:
        return {}
    text = (
        f"{number} nodes create MIG partitions for claims. Before Kubernetes 1.{_FIXED_IN}, "
        "kube-scheduler looks at all devices of all these nodes for every pod with a claim. With "
        "20 such nodes of 200 it placed 3.7 pods a second instead of 93. Partitions of a layout "
        "have none of this cost"
    )
    return {name: text for name in creating if nodes.get(name)}


@functools.lru_cache(maxsize=256)
def creates_partitions(profile: str, rules: str) -> bool:
    """Whether *rules*, a canonical JSON, have partitions created for claims."""
    try:
        entries = decode_rules(rules, profile).entries
    except ConfigError:
        return False
    return any(entry.rules.mig.dynamic for entry in entries)
