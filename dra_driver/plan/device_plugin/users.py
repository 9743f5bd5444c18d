"""Which pods have the devices that the kubelet gave out, and what is to be done about that.

The kubelet tells nobody when a device is given back. It says which container has which devices
(``kubeletplugin.device_plugin.checkpoint``), the API server which pods have ended.
"""

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from enum import StrEnum
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.k8s.node_labels import NodeStatus
from dra_driver.k8s.pods import KubeletPod, NodePod, PodSpec
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    Resource,
    ResourceName,
)
from dra_driver.model.profiles import MpsTenants
from dra_driver.model.records import ClaimRecord, DeviceAllocation
from dra_driver.plan.device_plugin.allocations import allocation_uid
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.mps.containers import mps_tenants_of, tenant_problems

_NVIDIA_SOCKET: Final = re.compile(r"nvidia-(?P<name>.+)\.sock")
_OWN_IDS: Final = ("GPU-", "MIG-")  # how the UUIDs of NVML begin

Pods = Mapping[PodUid, NodePod]
"""The pods of this node, by the UID that the kubelet has for them."""


@frozen
class AllocatedPod:
    """A pod that has the devices of an allocation, and in which containers.

    *spec*: None: the API server did not tell, so the namespace is empty and the name is the UID.
    """

    pod: Pod
    containers: tuple[str, ...]  # sorted
    answers: tuple[ContainerResponse, ...] = ()  # which the kubelet kept for these
    namespace: str = ""
    spec: PodSpec | None = None


def allocation_of(container: AllocatedContainer) -> DeviceAllocation:
    """What *container* was given."""
    return DeviceAllocation(container.resource, container.ids)


def pods_with(
    allocation: DeviceAllocation, containers: Iterable[AllocatedContainer], pods: Pods
) -> tuple[AllocatedPod, ...]:
    """The pods that have *allocation*, as far as *pods* tell without those that have ended; sorted.

    The kubelet gives a device to one pod at a time. The app container of a pod can have what an
    init container had.
    """
    by_pod: dict[PodUid, list[AllocatedContainer]] = {}
    for container in containers:
        if allocation_of(container) == allocation:
            by_pod.setdefault(container.pod, []).append(container)
    return tuple(
        _allocated_pod(uid, having, pods.get(uid))
        for uid, having in sorted(by_pod.items())
        if not (uid in pods and pods[uid].ended)
    )


def _allocated_pod(
    uid: PodUid, containers: Collection[AllocatedContainer], pod: NodePod | None
) -> AllocatedPod:
    names = tuple(sorted(each.container for each in containers))
    answers = tuple(each.answer for each in containers if each.answer is not None)
    if pod is None:
        return AllocatedPod(Pod(uid, uid), names, answers)
    return AllocatedPod(pod.pod, names, answers, pod.namespace, pod.spec)


def names_files_of(answer: ContainerResponse, record: ClaimRecord) -> bool:
    """Whether it was answered file by file, and by us: another device plugin may have been here."""
    return _mounts_files_of(answer, record.claim.uid)


def _mounts_files_of(answer: ContainerResponse, uid: ClaimUid) -> bool:
    return any(uid in mount.host_path for mount in answer.mounts)


def needs_pod(record: ClaimRecord) -> bool:
    """Whether its container may start only once it is known whose it is."""
    strict = any(holding.limit is not None and holding.limit.strict for holding in record.holdings)
    return strict or mps_tenants_of(record) is not MpsTenants.ANY


def as_recorded(pod: AllocatedPod, record: ClaimRecord) -> AllocatedPod:
    """*pod* with the name under which it is recorded already, where that is not known now."""
    recorded = next((each for each in record.pods if each.uid == pod.pod.uid), None)
    if pod.spec is not None or recorded is None:
        return pod
    return replace(pod, pod=recorded, namespace=record.claim.namespace)


def listed_containers(
    listed: Iterable[KubeletPod], pods: Iterable[NodePod]
) -> Iterator[AllocatedContainer]:
    """The containers with devices that the kubelet *listed* by the names of their pods. Of two pods
    with one name the one that has ended is meant by nobody."""
    uids = {(pod.namespace, pod.pod.name): pod.pod.uid for pod in pods if not pod.ended}
    for pod in listed:
        if (uid := uids.get((pod.namespace, pod.name))) is None:
            continue
        for (container, resource), ids in pod.devices.items():
            sorted_ids = tuple(sorted(DeviceId(id_) for id_ in ids))
            yield AllocatedContainer(uid, container, ResourceName(resource), sorted_ids)


def overlapping(
    allocation: DeviceAllocation, records: Iterable[ClaimRecord]
) -> tuple[ClaimRecord, ...]:
    """The allocations among *records* with any device of this one; itself, too."""
    ids = set(allocation.ids)
    return tuple(
        record
        for record in records
        if record.allocation and not ids.isdisjoint(record.allocation.ids)
    )


def of_same_containers(
    allocation: DeviceAllocation, containers: Sequence[AllocatedContainer]
) -> frozenset[DeviceAllocation]:
    """What the containers with *allocation* have of other resources."""
    same = {(each.pod, each.container) for each in containers if allocation_of(each) == allocation}
    return frozenset(
        allocation_of(each)
        for each in containers
        if (each.pod, each.container) in same and each.resource != allocation.resource
    )


def server_problems(record: ClaimRecord, others: Iterable[ClaimRecord]) -> Iterator[str]:
    """Why a program cannot use what is recorded beside *others*, which its container has, too."""
    for other in others:
        if record.namespaces or other.namespaces:
            yield (
                f"its container has {other.known_as} besides, and one of the two is under MPS: a "
                "program under MPS reaches one server and sees no other GPU; use different "
                "containers"
            )


def pod_problems(record: ClaimRecord, pod: AllocatedPod) -> Sequence[str]:
    """Why *pod* may not have what is recorded, by the rules of the node."""
    if (tenants := mps_tenants_of(record)) is MpsTenants.ANY:
        return ()
    if pod.spec is None:
        return (
            f"whose pods may share a GPU by MPS is said by this node's profile (mpsTenants: "
            f"{tenants}), and the API server does not tell what pod {pod.pod.uid} is",
        )
    request = record.holdings[0].request
    claim = ClaimRef(pod.namespace, record.claim.name, record.claim.uid)
    containers = tuple(
        replace(each, uses=frozenset({(claim.name, request)}))
        if each.name in pod.containers
        else each
        for each in pod.spec.containers
    )
    return tenant_problems(tenants, claim, replace(pod.spec, containers=containers), {request})


def uids_with(
    allocation: DeviceAllocation, containers: Iterable[AllocatedContainer]
) -> frozenset[PodUid]:
    """The pods that have *allocation*, and those that had it and have ended."""
    return frozenset(each.pod for each in containers if allocation_of(each) == allocation)


class Use(StrEnum):
    """What becomes of an allocation that is recorded."""

    USED = "Used"  # a pod has it
    ENDED = "Ended"  # its pods have ended
    MISSING = "Missing"  # no pod is seen with it, which may be so for a moment only


def use_of(
    allocation: DeviceAllocation, containers: Iterable[AllocatedContainer], pods: Pods | None
) -> Use:
    """*pods*: None: the API server does not tell, so that no pod has ended."""
    uids = uids_with(allocation, containers)
    if any(pods is None or _lives(uid, pods) for uid in uids):
        return Use.USED
    return Use.ENDED if uids and pods is not None and uids <= pods.keys() else Use.MISSING


def have_gone(record: ClaimRecord, named: Collection[PodUid], pods: Pods | None) -> bool:
    """Whether pods had what is recorded that are there no more, and the kubelet has *named* no
    others since: nobody comes who is only not known yet."""
    had = {pod.uid for pod in record.pods}
    if pods is None or not had or not had.issuperset(named):
        return False
    return not any(_lives(uid, pods) for uid in had)


class Giver(StrEnum):
    """Which device plugin gave a container its devices."""

    US = "Us"
    OTHER = "Other"
    UNKNOWN = "Unknown"  # one of the two


def by_giver(
    containers: Iterable[AllocatedContainer], records: Iterable[ClaimRecord], beside_other: bool
) -> Mapping[Giver, Sequence[AllocatedContainer]]:
    """*containers*, each in its place. Another device plugin lists the same ids; but what we answer
    names the allocation. Where the kubelet does not say what was answered, what is recorded is
    ours, and so is the rest unless another plugin is there (*beside_other*)."""
    recorded = {record.allocation for record in records}
    given: dict[Giver, list[AllocatedContainer]] = {giver: [] for giver in Giver}
    for container in containers:
        allocation = allocation_of(container)
        if container.answer is None:
            is_ours = allocation in recorded or not beside_other
            given[Giver.US if is_ours else Giver.UNKNOWN].append(container)
        else:
            is_ours = _is_our_answer(container.answer, allocation)
            given[Giver.US if is_ours else Giver.OTHER].append(container)
    return given


def untracked_containers(
    containers: Iterable[AllocatedContainer],
    records: Iterable[ClaimRecord],
    names: ResourceNames,
    *,
    by_dra: bool,
) -> tuple[AllocatedContainer, ...]:
    """Those with our resources by another device plugin, or by nobody knows which, where nobody
    keeps these from others: all, if GPUs are given out *by_dra*, else those whose ids do not tell
    which GPU they are. Ended pods are among them, until the kubelet gives something out again."""
    given = by_giver(containers, records, beside_other=True)
    theirs = (*given[Giver.OTHER], *given[Giver.UNKNOWN])
    return tuple(
        each
        for each in theirs
        if names.include(each.resource) and (by_dra or not all(map(_is_own_id, each.ids)))
    )


@frozen
class PodsLeft:
    """What became of the pods of some containers."""

    living: tuple[str, ...] = ()  # for people to read; sorted
    ended: frozenset[PodUid] = frozenset()
    missing: frozenset[PodUid] = frozenset()  # gone, or static and about to be known


def pods_left(containers: Iterable[AllocatedContainer], pods: Pods) -> PodsLeft:
    """What became of the pods with *containers*. *pods*: all of the node."""
    uids = {each.pod for each in containers}
    living = [pods[uid] for uid in uids if _lives(uid, pods)]
    return PodsLeft(
        tuple(sorted(f"pod {pod.namespace}/{pod.pod.name}" for pod in living)),
        frozenset(uid for uid in uids & pods.keys() if pods[uid].ended),
        frozenset(uids - pods.keys()),
    )


def was_given_by_another_plugin(pods: Sequence[AllocatedPod], allocation: DeviceAllocation) -> bool:
    """Whether the containers of *pods* were given *allocation*, all of them, by another plugin: one
    of which the kubelet does not say what was answered may have it from us."""
    answers = [answer for pod in pods for answer in pod.answers]
    are_known = 0 < len(answers) == sum(len(pod.containers) for pod in pods)
    return are_known and not any(_is_our_answer(each, allocation) for each in answers)


def _is_our_answer(answer: ContainerResponse, allocation: DeviceAllocation) -> bool:
    uid = allocation_uid(allocation)
    return _mounts_files_of(answer, uid) or any(uid in name for name in answer.cdi_names)


def unrecorded(
    containers: Iterable[AllocatedContainer],
    records: Iterable[ClaimRecord],
    pods: Pods | None,
    names: ResourceNames,
) -> tuple[DeviceAllocation, ...]:
    """What pods have of our resources and nothing is recorded of; sorted."""
    known = {record.allocation for record in records if record.completed}
    held = held_allocations(containers, pods, names)
    return tuple(sorted(held - known, key=lambda each: (each.resource, each.ids)))


def held_allocations(
    containers: Iterable[AllocatedContainer], pods: Pods | None, names: ResourceNames
) -> frozenset[DeviceAllocation]:
    """What containers have of our resources, without those of pods that have ended. The kubelet
    goes on to say what these had, until it gives something out again."""
    return frozenset(map(allocation_of, _holding(containers, pods, names)))


def holding_pods(
    containers: Iterable[AllocatedContainer], pods: Pods | None, names: ResourceNames
) -> tuple[str, ...]:
    """The pods of the same, for people to read; sorted."""
    uids = {each.pod for each in _holding(containers, pods, names)}
    named = ((uid, (pods or {}).get(uid)) for uid in uids)
    return tuple(
        sorted(f"pod {pod.namespace}/{pod.pod.name}" if pod else f"pod {uid}" for uid, pod in named)
    )


def _holding(
    containers: Iterable[AllocatedContainer], pods: Pods | None, names: ResourceNames
) -> Iterator[AllocatedContainer]:
    return (
        each
        for each in containers
        if names.include(each.resource)
        and all(map(_is_own_id, each.ids))  # not what another device plugin alone lists
        and (pods is None or _lives(each.pod, pods))
    )


def _lives(uid: PodUid, pods: Pods) -> bool:
    return uid in pods and not pods[uid].ended


def foreign_devices(
    registered: Mapping[ResourceName, Iterable[DeviceId]],
    names: ResourceNames,
    allocatable: Container[str] | None = None,
) -> dict[ResourceName, DeviceId]:
    """By resource of ours, one of its *registered* devices that another device plugin lists. Of one
    that is gone the kubelet still knows them, but none is *allocatable* (None: do not look)."""
    foreign = (
        (resource, min((id_ for id_ in ids if not _is_own_id(id_)), default=None))
        for resource, ids in registered.items()
        if names.include(resource) and (allocatable is None or resource in allocatable)
    )
    return {resource: id_ for resource, id_ in foreign if id_ is not None}


def not_taken(
    offered: Iterable[ResourceName],
    sockets: Iterable[str],
    foreign: Collection[ResourceName],
    names: ResourceNames,
) -> Set[ResourceName]:
    """The resources that we have *offered* and another device plugin has not taken. *sockets*: the
    names of its files; NVIDIA's has one for each resource, ``nvidia-<name>.sock`` (its server.go).
    *foreign*: resources of which it lists devices. None where what it has taken does not follow."""
    served = {_NVIDIA_SOCKET.fullmatch(socket) for socket in sockets}
    taken = {f"nvidia.com/{match['name']}" for match in served if match}
    is_known = None not in served and all(names.include(ResourceName(name)) for name in taken)
    if not (taken and is_known and taken.issuperset(foreign)):
        return set()
    return set(offered) - taken


def _is_own_id(id_: DeviceId) -> bool:
    """Whether this driver may have listed it, on this node as it was once."""
    return id_.startswith(_OWN_IDS)


def with_leftovers(
    listed: Sequence[Resource], allocatable: Mapping[str, str], names: ResourceNames
) -> tuple[Resource, ...]:
    """*listed*, with an empty list for each resource of ours that is *allocatable* by the status of
    the Node and that nobody lists: a kubelet that has lost its checkpoint would say so for ever."""
    known = {resource.name for resource in listed}
    leftovers = (
        Resource(ResourceName(name), ())
        for name, quantity in sorted(allocatable.items())
        if quantity != "0" and name not in known and names.include(name)
    )
    return (*listed, *leftovers)


def left_behind(status: NodeStatus | None, names: ResourceNames) -> frozenset[ResourceName] | None:
    """The resources of ours that the kubelet still remembers, by *status* of the Node, and that
    nobody lists: the process that did ended less than five minutes ago. None: that is not known
    yet, for the status is some seconds late, or somebody does list them."""
    if status is None:
        return None
    capacity = {
        ResourceName(name)
        for name, quantity in status.capacity.items()
        if quantity != "0" and names.include(name)
    }
    is_listed = any(status.allocatable.get(name, "0") != "0" for name in capacity)
    return None if is_listed else frozenset(capacity)


def nothing_more(
    resources: Iterable[Resource], held: Iterable[DeviceAllocation]
) -> tuple[Resource, ...]:
    """*resources*, of which nothing more is to be given out: what is not *held* is unhealthy, so
    that no pod comes here for it, and no device leaves its list."""
    ids = {id_ for allocation in held for id_ in allocation.ids}
    return tuple(
        replace(
            resource,
            devices=tuple(
                replace(device, healthy=device.healthy and device.id in ids)
                for device in resource.devices
            ),
        )
        for resource in resources
    )
