"""Pods that ask for GPUs without a claim, wait, and can never be scheduled, and why.

A pod asks for them as with a device plugin (``nvidia.com/gpu: 1``). A DeviceClass gives such a name
(KEP-5004), and the scheduler claims devices of the class: as many as each container asks for. An
init container, which has ended when they run, uses those of the containers after it. As with claims
only what is certain is reported. A resource that a device plugin offers on some node is left out.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import Any

from dra_driver.base.errors import Forbidden, NotFound, Refused
from dra_driver.base.frozen import frozen
from dra_driver.cli.doctor.cluster_checks import ApiPermission, CheckedCluster, denied
from dra_driver.cli.doctor.scheduling.candidates import DeviceRequest, candidates, is_ours
from dra_driver.cli.doctor.scheduling.pending_claims import unservable
from dra_driver.cli.doctor.scheduling.published_devices import PublishedDevices
from dra_driver.cli.doctor.scheduling.tainted import ADVICE, waits_for_taints
from dra_driver.cli.findings import Finding, abbreviated, ok, skip, warn
from dra_driver.k8s import quantity

Document = Mapping[str, Any]

IMPLICIT = "deviceclass.resource.kubernetes.io/"  # and the name of any class


@frozen
class ExtendedResourceRequest:
    """Devices that are claimed for one container."""

    container: str
    resource: str
    count: int

    def __str__(self) -> str:
        return f"container {self.container}, {self.resource}"


def amounts_of(pod: Document) -> list[ExtendedResourceRequest]:
    """What is claimed for *pod*, by the names of resources that are none of Kubernetes' own."""
    containers = list(_containers(pod))
    names = sorted(
        {name for container, _ in containers for name in _asked(container) if "/" in name}
    )
    return [amount for name in names for amount in _of_resource(name, containers)]


def classes_of(classes: Mapping[str, Document]) -> dict[str, str]:
    """By the name of a resource the DeviceClass that serves it: of two the newer one, else the
    first by name."""
    class_names = {f"{IMPLICIT}{name}": name for name in classes}
    for name in sorted(sorted(classes, reverse=True), key=lambda name: _made(classes[name])):
        if resource := (classes[name].get("spec") or {}).get("extendedResourceName"):
            class_names[resource] = name
    return class_names


def _of_resource(
    name: str, containers: list[tuple[Document, bool]]
) -> Iterator[ExtendedResourceRequest]:
    counts = [_count(container, name) for container, _ in containers]
    stays = [0 if goes else count for count, (_, goes) in zip(counts, containers, strict=True)]
    of_containers = [
        ExtendedResourceRequest(container["name"], name, count)
        for count, (container, _) in zip(stays, containers, strict=True)
        if count
    ]
    before = [
        ExtendedResourceRequest(container["name"], name, counts[place] - sum(stays[place:]))
        for place, (container, goes) in enumerate(containers)
        if goes
    ]
    most = max(before, key=lambda request: request.count, default=None)
    if most is not None and most.count > 0:  # they run one after the other
        yield most
    yield from of_containers


def _containers(pod: Document) -> Iterator[tuple[Document, bool]]:
    """Each, in the order in which they start, and whether it goes before the next one does."""
    for container in pod["spec"].get("initContainers") or ():
        yield container, container.get("restartPolicy") != "Always"
    for container in pod["spec"].get("containers") or ():
        yield container, False


def _asked(container: Document) -> Mapping[str, str]:
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _count(container: Document, resource: str) -> int:
    return int(quantity.parse(str(_asked(container).get(resource, "0"))))


def _made(device_class: Document) -> str:
    return str((device_class.get("metadata") or {}).get("creationTimestamp") or "")


_FAMILIES = ("nvidia.com/gpu", "nvidia.com/mig-")  # as device plugins for these GPUs call them


@frozen
class PodVerdict:
    """Of the waiting pods, how many were judged, and those that wait in vain, by the reason."""

    judged: int
    problems: Mapping[str, tuple[str, ...]]  # their namespaces and names
    tainted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # until taints go
    of_plugins: int = 0  # how many ask for what a device plugin offers, and were not judged


def asks_for_gpus(pod: Document) -> bool:
    """Whether the scheduler has yet to find a node for *pod*, and it may be for us to serve."""
    waits = not pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("nodeName")
    return waits and bool(amounts_of(pod))


def judge_pods(
    pods: Iterable[Document], published: PublishedDevices, plugins: Collection[str]
) -> PodVerdict:
    """*pods*: those that ``asks_for_gpus`` accepts; *plugins*: the resources that nodes have of
    device plugins."""
    classes = classes_of(published.classes)

    @cache  # all pods of one owner ask for the same
    def judgement(amounts: tuple[ExtendedResourceRequest, ...]) -> tuple[bool, str, str]:
        ours = [amount for amount in amounts if _is_ours(amount, classes, published)]
        if not ours:
            return False, "", ""
        if never := _why_not(ours, classes, published):
            return True, never, ""
        requests = [[_request(amount, classes[amount.resource])] for amount in ours]
        return True, "", waits_for_taints(requests, published)

    judged = of_plugins = 0
    problems: dict[str, list[str]] = {}
    tainted: dict[str, list[str]] = {}
    for pod in pods:
        asked = amounts_of(pod)
        amounts = tuple(amount for amount in asked if amount.resource not in plugins)
        for_us, never, until_then = judgement(amounts)
        judged += for_us
        of_plugins += not for_us and any(each.resource.startswith(_FAMILIES) for each in asked)
        name = f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"
        if never:
            problems.setdefault(never, []).append(name)
        elif until_then:
            tainted.setdefault(until_then, []).append(name)
    return PodVerdict(judged, _sorted(problems), _sorted(tainted), of_plugins)


def _sorted(names_by_reason: Mapping[str, list[str]]) -> Mapping[str, tuple[str, ...]]:
    return {why: tuple(sorted(names)) for why, names in names_by_reason.items()}


def to_be_had(published: PublishedDevices) -> Iterator[str]:
    """The resources that pods can ask for, each of which some device serves."""
    for name, device_class in sorted(classes_of(published.classes).items()):
        request = _request(ExtendedResourceRequest("", name, 1), device_class)
        if name.startswith(IMPLICIT) or not is_ours(request, published):
            continue
        if not candidates(request, published)[1]:
            yield name


def _is_ours(
    amount: ExtendedResourceRequest, classes: Mapping[str, str], published: PublishedDevices
) -> bool:
    """One that no DeviceClass serves goes by its name."""
    name = amount.resource
    if name in classes:
        return is_ours(_request(amount, classes[name]), published)
    implicit = name.startswith(IMPLICIT) and f".{name.removeprefix(IMPLICIT)}"
    return name.startswith(_FAMILIES) or bool(
        implicit and implicit.endswith(f".{published.driver}")
    )


def _why_not(
    amounts: list[ExtendedResourceRequest], classes: Mapping[str, str], published: PublishedDevices
) -> str:
    without_class = [amount for amount in amounts if amount.resource not in classes]
    if without_class:
        return "; ".join(_no_class(amount) for amount in without_class)
    requests = [[_request(amount, classes[amount.resource])] for amount in amounts]
    return unservable(requests, published, "its containers together")


def _no_class(amount: ExtendedResourceRequest) -> str:
    if amount.resource.startswith(IMPLICIT):
        return f"{amount}: there is no DeviceClass {amount.resource.removeprefix(IMPLICIT)}"
    return f"{amount}: no DeviceClass has it as its extendedResourceName, and no node offers it"


def _request(amount: ExtendedResourceRequest, device_class: str) -> DeviceRequest:
    spec = {"deviceClassName": device_class, "count": amount.count}
    return DeviceRequest(str(amount), spec, str(amount), has_fields=False)


PODS = "pending pods"
_MOST_TOLD = 20
_LIST_PODS = ApiPermission("", "pods", "list")
_WAITING = {"fieldSelector": "status.phase=Pending,spec.nodeName="}
_WITHOUT_NAMES = (
    "no DeviceClass names a resource: that takes Kubernetes 1.36 (feature DRAExtendedResource) and "
    "the chart's DeviceClasses; else have the pod ask by a ResourceClaim (spec.resourceClaims)"
)


def pending_pods(
    cluster: CheckedCluster, read_published: Callable[[], PublishedDevices]
) -> Iterator[Finding]:
    """Those that ask as they would ask a device plugin."""
    try:
        _refuse_without_right(cluster)
        pods = [
            pod
            for page in cluster.server.pages("/api/v1/pods", _WAITING)
            for pod in page.get("items") or ()
            if asks_for_gpus(pod)
        ]
        if not pods:
            yield ok(PODS, "none asks for a GPU by the name of a resource")
            return
        published = read_published()
        verdict = judge_pods(pods, published, _of_plugins(cluster))
    except Forbidden as e:
        yield skip(
            PODS,
            f"cannot be judged by this account ({e}); name an administrator's --kubeconfig",
        )
        return
    yield from of_pods(verdict, published)


def _refuse_without_right(cluster: CheckedCluster) -> None:
    """Forbidden: this account may not list pods, as that of the plugin. Asked before it is tried,
    so that no refused request of the driver is in the API server's audit log."""
    try:
        why = denied(cluster.server, _LIST_PODS)
    except (NotFound, Refused):  # the API server does not say: the list itself will tell
        return
    if why:
        raise Forbidden(f"{_LIST_PODS}: {why}")


def of_pods(verdict: PodVerdict, published: PublishedDevices) -> Iterator[Finding]:
    """Whoever wrote such a pod has to change it: that is no fault of this node."""
    if verdict.judged and not published.devices:
        yield warn(
            PODS,
            f"{verdict.judged} wait, and no node publishes a device of {published.driver}",
            "kubectl get resourceslices; see what the plugin's pods log",
        )
        return
    mend = _mend(published) if verdict.problems else ""
    for why, pods in sorted(verdict.problems.items())[:_MOST_TOLD]:
        yield warn(PODS, f"{abbreviated(pods)} can never be scheduled: {why}", mend)
    if (more := len(verdict.problems) - _MOST_TOLD) > 0:
        yield warn(PODS, f"{more} more reasons", "mend those first, then ask again")
    for why, pods in sorted(verdict.tainted.items())[:_MOST_TOLD]:
        yield warn(PODS, f"{abbreviated(pods)} waits: {why}", ADVICE)
    told = [*verdict.problems.values(), *verdict.tainted.values()]
    number = verdict.judged - sum(map(len, told))
    if verdict.of_plugins:
        yield ok(
            PODS,
            f"{verdict.of_plugins} wait for what a device plugin offers, of which only the "
            "scheduler knows whether they can get it: kubectl describe pod",
        )
    if number or not (told or verdict.of_plugins):
        yield ok(PODS, f"{number} wait for a GPU, and nothing is known that they could not get")


def _mend(published: PublishedDevices) -> str:
    """Names are what such a pod can choose from."""
    if not any(
        (each.get("spec") or {}).get("extendedResourceName") for each in published.classes.values()
    ):
        return _WITHOUT_NAMES
    listed = abbreviated(to_be_had(published)) or "none now"
    return (
        f"have the pod ask for what there is ({listed}), or let a node offer that by its profile; "
        "a kind of partition needs a DeviceClass, too (the chart's mig.profiles)"
    )


def _of_plugins(cluster: CheckedCluster) -> set[str]:
    """What some node has of a device plugin. While that one starts anew, all of it is in the
    capacity and nothing is allocatable; of one that is gone for good a zero stays in both."""
    return {
        name
        for page in cluster.server.pages("/api/v1/nodes")
        for node in page.get("items") or ()
        for amounts in ("capacity", "allocatable")
        for name, amount in ((node.get("status") or {}).get(amounts) or {}).items()
        if "/" in name and quantity.parse(str(amount))
    }
