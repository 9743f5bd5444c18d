"""``doctor``'s check of the NodeProfile that selects the node: whether it reached it, and why not.

What the plugin says of the profile that it was given is in ``sharing_checks``.
"""

from collections.abc import Iterator, Sequence

from api.names import NODE_PROFILES_PATH
from api.strict import ConfigError
from dra_driver.base.errors import Forbidden, NotFound
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.findings import Finding, abbreviated, ok, skip, warn
from dra_driver.k8s.api import Document
from dra_driver.model.node_profiles import (
    ConditionType,
    NodeProfileObject,
    NodeView,
    ProgressReason,
)
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.report import read_node
from dra_driver.plan.profiles.selection import assign_nodes, label_choice, select_profile

NODE_PROFILES = "NodeProfile"

_STOPPED = (ProgressReason.PAUSED, ProgressReason.TOO_MANY_FAILURES)


def check_node_profile(cluster: CheckedCluster) -> Iterator[Finding]:
    node = cluster.server.get(f"/api/v1/nodes/{cluster.node}")
    labels = node["metadata"].get("labels") or {}
    try:
        documents = [
            each for page in cluster.server.pages(NODE_PROFILES_PATH) for each in page["items"]
        ]
    except NotFound:
        yield ok(NODE_PROFILES, "this cluster has none: profiles are files")
        return
    except Forbidden as e:
        yield skip(NODE_PROFILES, str(e))
        return
    profiles = list(_readable(documents))
    label = label_choice(labels)
    chosen = (
        next((profile for profile in profiles if profile.name == label[1]), None)
        if label
        else select_profile(labels, profiles)
    )
    if chosen is None:
        why = f"the label {label[0]} names a file" if label else "none selects this node"
        yield ok(NODE_PROFILES, why)
        return
    if not label:
        yield from _ties(chosen, profiles, NodeView(cluster.node, "", "", labels))
    yield from _reached(chosen, node)


def _readable(documents: Sequence[Document]) -> Iterator[NodeProfileObject]:
    for document in documents:
        try:
            yield read_node_profile(document)
        except ConfigError:  # no object at all: no node has it
            continue


def _ties(
    chosen: NodeProfileObject, profiles: Sequence[NodeProfileObject], node: NodeView
) -> Iterator[Finding]:
    tied = sorted(assign_nodes(profiles, [node]).ties.get(chosen.name, ()))
    if tied:
        yield warn(
            NODE_PROFILES,
            f"{abbreviated(tied)} has the priority of {chosen.name} and selects this node, too; "
            f"{chosen.name}, the older one, holds",
            "give one of them a higher spec.priority, or another spec.nodeSelector",
        )


def _reached(profile: NodeProfileObject, node: Document) -> Iterator[Finding]:
    """Whether the node has what the profile says now; what waits for whom, where it has not."""
    view = read_node(node)
    report = view.report if view else None
    if report and report.revision == profile.revision:
        if report.refusal:
            yield warn(
                NODE_PROFILES,
                f"{profile.name}: this node refuses revision {profile.revision}: {report.refusal}",
                f"correct the profile, or dra-driver profile undo {profile.name}",
            )
            return
        yield ok(NODE_PROFILES, f"{profile.name}: this node has revision {profile.revision}")
        return
    progressing = profile.status.condition(ConditionType.PROGRESSING)
    missing = f"{profile.name}: this node does not have revision {profile.revision} yet"
    if view and view.given == profile.revision:
        yield warn(
            NODE_PROFILES,
            f"{missing}; it was given it, and its plugin has not reported",
            "look at the log of the plugin",
        )
    elif profile.status.observed_generation < profile.generation:
        yield warn(
            NODE_PROFILES,
            f"{missing}; the controller has not seen the change",
            "is a controller running? kubectl get pods,leases in the namespace of the release",
        )
    elif progressing and progressing.reason in _STOPPED:
        yield warn(
            NODE_PROFILES,
            f"{missing}; the rollout has stopped: {progressing.message or progressing.reason}",
            f"dra-driver profile status {profile.name}",
        )
    else:
        yield ok(NODE_PROFILES, f"{missing}; it has its turn later")
