"""By which API of Kubernetes a node gives its GPUs out: by one at any moment.

=========================================  ==============  ========================================
the profile says                           it is           because
=========================================  ==============  ========================================
``api: DevicePlugin``                      DevicePlugin    every kubelet has that API
``api: DRA``                               DRA             it is asked for
the same, no resource.k8s.io               DevicePlugin    DRA cannot be served; a problem says so
the same, kubelet older than 1.32          DevicePlugin    as above
``api: Auto``, no resource.k8s.io          DevicePlugin
``api: Auto``, kubelet older than 1.34     DevicePlugin    it knows no extended resources by DRA
``api: Auto``, a DeviceClass with ours     DRA             pods with ``nvidia.com/gpu`` get claims
``api: Auto``, no such DeviceClass         DevicePlugin    these pods would find nothing
``api: Auto``, no extended resources       DRA             no pod asks for them (kubelet 1.32)
what that depends on is not known          as it was       an outage changes nothing
=========================================  ==============  ========================================

A node goes to another API in two steps, once no pod holds a GPU by the one that it has: first
nothing more is given out by that one; if still nothing is held then, the other one is served. What
is held meanwhile takes the node back.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.k8s.pods import NodePod
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    DeviceId,
    ResourceName,
)
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord, DeviceAllocation
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import MOST_NAMED, DevicePluginHolders, DevicePluginUse
from dra_driver.plan.node_conditions import (
    LONGEST_MESSAGE,
    NodeCondition,
    bounded,
    first_names,
)

KubeletVersion = tuple[int, int]  # 1.28

_DRA_KUBELET: KubeletVersion = (1, 32)  # the first that speaks a version of DRA that we do
_EXTENDED_RESOURCE_KUBELET: KubeletVersion = (1, 34)

OTHER_DEVICE_PLUGIN: Final = "OtherDevicePlugin"  # a reason of the condition
_MEND = "set spec.api of the profile to Auto or DevicePlugin, or {needed}"


@frozen
class NodeApiFacts:
    """What the choice depends on. None: it is not known."""

    asked: AllocationApi | None  # by the profile in force
    dra_served: bool | None  # whether the API server serves resource.k8s.io
    kubelet: KubeletVersion | None
    resource: str  # our extended resource; empty: none is configured
    device_class: str | None  # which carries that resource's name; empty: none does
    serving: AllocationApi | None = None  # now; None: nothing was chosen yet
    draining: bool = False  # nothing more was given out by it while *holder_names* was found
    holder_names: tuple[str, ...] | None = ()  # pods and claims with GPUs by *serving*
    other_plugin: str = ""  # which else serves our resources here


@frozen
class ApiChoice:
    """What a node serves from now on."""

    serving: AllocationApi | None = None  # None: not known yet
    offering: bool = False  # whether more is given out by it
    wanted: AllocationApi | None = None  # another one than *serving*: it waits
    why: str = ""  # it is wanted
    waits_for: tuple[str, ...] = ()  # who holds a GPU by *serving*; asked only where it matters
    problem: str = ""  # what is asked for and cannot be, and what to do
    other_plugin: str = ""  # which else serves our resources, so that nothing is offered
    other_plugin_is_gone: bool = False  # but pods have GPUs by it, or may have
    holders: DevicePluginHolders | None = None  # beside *other_plugin*; None: it is not known


class ApiState(StrEnum):
    """What becomes of one API."""

    OFF = "Off"
    DRAINING = "Draining"  # who has something goes on; nothing more is given out
    ON = "On"


def api_state(choice: ApiChoice, api: AllocationApi) -> ApiState:
    """What becomes of *api*, which is no ``AUTO``."""
    if choice.serving is not api:
        return ApiState.OFF
    return ApiState.ON if choice.offering else ApiState.DRAINING


def choose_api(facts: NodeApiFacts) -> ApiChoice:
    """What the node serves now."""
    choice = _choose(facts)
    if facts.other_plugin:
        return replace(choice, offering=False, other_plugin=facts.other_plugin)
    return choice


def _choose(facts: NodeApiFacts) -> ApiChoice:
    wanted, why, problem = _wanted(facts)
    serving, nobody_holds = facts.serving, facts.holder_names == ()
    if wanted is None:  # an outage changes nothing
        return ApiChoice(serving, serving is not None, serving, why)
    if serving in (None, wanted) or (nobody_holds and facts.draining):
        return ApiChoice(wanted, True, wanted, why, problem=problem)
    waits_for = facts.holder_names
    if waits_for is None:
        waits_for = ("an answer to who holds GPUs",)
    is_gone = serving is AllocationApi.DRA and facts.dra_served is False
    offering = not (nobody_holds or is_gone)
    return ApiChoice(serving, offering, wanted, why, waits_for, problem)


def _wanted(facts: NodeApiFacts) -> tuple[AllocationApi | None, str, str]:
    """The API, why it is that one, and what cannot be followed. None: that is not known."""
    if facts.asked is None:
        return None, "the profile is not known", ""
    if facts.asked is AllocationApi.DEVICE_PLUGIN:
        return AllocationApi.DEVICE_PLUGIN, "the profile says api: DevicePlugin", ""
    if facts.dra_served is None or (facts.dra_served and facts.kubelet is None):
        return None, "the API server does not say what it serves", ""
    if facts.asked is AllocationApi.DRA:
        if obstacle := _obstacle(facts, _DRA_KUBELET):
            problem = f"the profile says api: DRA, but {obstacle[0]}: "
            problem += _MEND.format(needed=obstacle[1])
            return AllocationApi.DEVICE_PLUGIN, obstacle[0], problem
        return AllocationApi.DRA, "the profile says api: DRA", ""
    return *_automatic(facts), ""


def _automatic(facts: NodeApiFacts) -> tuple[AllocationApi | None, str]:
    needed = _EXTENDED_RESOURCE_KUBELET if facts.resource else _DRA_KUBELET
    if obstacle := _obstacle(facts, needed):
        return AllocationApi.DEVICE_PLUGIN, obstacle[0]
    if not facts.resource:
        return AllocationApi.DRA, "no extended resource is configured"
    if facts.device_class is None:
        return None, f"it is not known whether a DeviceClass maps {facts.resource}"
    if facts.device_class:
        return AllocationApi.DRA, f"DeviceClass {facts.device_class} maps {facts.resource}"
    return AllocationApi.DEVICE_PLUGIN, f"no DeviceClass maps {facts.resource}"


def _obstacle(facts: NodeApiFacts, needed: KubeletVersion) -> tuple[str, str] | None:
    """Why DRA cannot be served, and what would have to be done."""
    if not facts.dra_served:
        return (
            "the API server does not serve resource.k8s.io",
            "turn it on (Kubernetes 1.34 and newer serve it)",
        )
    if facts.kubelet is not None and facts.kubelet < needed:
        version, least = (".".join(map(str, each)) for each in (facts.kubelet, needed))
        return f"the kubelet is of {version}", f"update the kubelet to {least} or newer"
    return None


def kubelet_version(text: str) -> KubeletVersion | None:
    """The version in what a Node says; None: it says none.

    >>> kubelet_version("v1.34.1-gke.5"), kubelet_version("")
    ((1, 34), None)
    """
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def holder_names(records: Iterable[ClaimRecord], api: AllocationApi) -> tuple[str, ...]:
    """Who holds something by *api*, for people to read: pods, or claims that no pod is known of."""
    of_api = [record for record in records if _api_of(record) is api]
    return tuple(sorted({name for record in of_api for name in _users(record)}))


def device_plugin_holders(records: Iterable[ClaimRecord], damaged: int) -> DevicePluginHolders:
    """Who has GPUs by the device-plugin API. Each of the *damaged* records may be of one more. Pods
    of which the API server did not tell have no namespace, and count only."""
    of_api = [each for each in records if _api_of(each) is AllocationApi.DEVICE_PLUGIN]
    uids = {pod.uid for each in of_api for pod in each.pods}
    pods = {(each.claim.namespace, pod.name) for each in of_api for pod in each.pods}
    names = sorted(f"{namespace}/{name}" for namespace, name in pods if namespace)
    without_pods = damaged + sum(not each.pods for each in of_api)
    return DevicePluginHolders(tuple(names[:MOST_NAMED]), len(uids) + without_pods)


def held_api(
    records: Sequence[ClaimRecord], given: Collection[DeviceAllocation]
) -> AllocationApi | None:
    """By which API the node gave GPUs out, as its records tell, else what the kubelet has *given*:
    pods have that by the device-plugin API, whoever served it. None: nothing is held."""
    if records:
        return _api_of(records[0])
    return AllocationApi.DEVICE_PLUGIN if given else None


def _api_of(record: ClaimRecord) -> AllocationApi:
    return AllocationApi.DRA if record.allocation is None else AllocationApi.DEVICE_PLUGIN


def _users(record: ClaimRecord) -> Iterator[str]:
    if record.pods:
        yield from (f"pod {record.claim.namespace}/{pod.name}" for pod in record.pods)
    elif record.allocation is None:
        yield f"claim {record.claim}"
    else:
        yield f"a container with {record.allocation.resource} ({', '.join(record.allocation.ids)})"


def other_device_plugin(
    sockets: Sequence[str], resources: Sequence[str], foreign: Mapping[ResourceName, DeviceId]
) -> str:
    """That somebody else gives out the GPUs of this node, and what to do about it; empty: nobody
    does. *sockets*: of device plugins for NVIDIA's GPUs. *resources*: of ours, given out by
    others. *foreign*: devices that others list, by the resource of ours."""
    if not (sockets or resources or foreign):
        return ""
    devices = (f"the kubelet has the device {id_} of {name}" for name, id_ in foreign.items())
    signs = ", ".join((*sockets, *devices))
    signs = signs or f"{', '.join(resources)} is allocatable on the Node"
    return (
        f"another device plugin gives out the GPUs of this node ({signs}): remove it from this "
        "node (NVIDIA's: its DaemonSet, or devicePlugin.enabled=false of the GPU operator)"
    )


WAS_HERE: Final = (
    "another device plugin gave out the GPUs of this node a moment ago, and may come back: nothing "
    "is offered for half a minute"
)


def not_known_what_is_left(why: str) -> str:
    """That pods may have GPUs by another device plugin."""
    return f"it is not known whether pods have GPUs by another device plugin that is gone: {why}"


def left_with_gpus(pods: Sequence[str]) -> str:
    """That another device plugin is gone, and *pods* have GPUs by it."""
    room = LONGEST_MESSAGE // 2
    named = first_names(pods, len(pods), room) or f"{len(pods)} pods"
    return (
        "another device plugin is gone, but pods have GPUs by it, and nothing is offered until "
        f"they have ended: {named}"
    )


def api_condition(choice: ApiChoice) -> NodeCondition | None:
    """What the Node says of *choice*, for people. None: nothing is chosen yet.

    ============================  ====== =====================
    the node                      status reason
    ============================  ====== =====================
    gives GPUs out by an API      True   ``DRA``, ``DevicePlugin``
    goes to the other one now     False  the one that it leaves
    another device plugin does    False  ``OtherDevicePlugin``
    ============================  ====== =====================
    """
    if choice.serving is None:
        return None
    status = "True" if choice.offering else "False"
    if choice.other_plugin:
        message = bounded(choice.other_plugin, LONGEST_MESSAGE)
        return NodeCondition(status, OTHER_DEVICE_PLUGIN, message)
    return NodeCondition(status, str(choice.serving), choice_text(choice, LONGEST_MESSAGE))


def device_plugin_use(choice: ApiChoice, names: ResourceNames) -> DevicePluginUse | None:
    """What the Node says for commands. None: pods get GPUs by claims alone, or it is not known."""
    if choice.serving is not AllocationApi.DEVICE_PLUGIN and not choice.other_plugin:
        return None
    return DevicePluginUse(names, choice.holders)


def choice_text(choice: ApiChoice, room: int) -> str:
    """Why it is that API, what the node goes to, and who it waits for, as far as there is room."""
    if choice.wanted in (None, choice.serving):
        return bounded("; ".join(filter(None, (choice.why, choice.problem))), room)
    because = "; ".join(filter(None, (choice.why, choice.problem)))
    text = bounded(f"{choice.wanted} is to come: {because}", room // 2)
    if not choice.waits_for:
        return f"{text}; nothing is given out meanwhile"
    text += "; waits for "
    count = len(choice.waits_for)
    return text + (first_names(choice.waits_for, count, room - len(text)) or f"{count} pods")


POD_MEND = (
    "spec.nodeName is set, so the scheduler, which makes the claim for it, has not seen the pod: "
    "write a nodeSelector or an affinity instead, or let the profile of the node say "
    "api: DevicePlugin"
)


def pods_without_gpus(pods: Iterable[NodePod], names: ResourceNames) -> tuple[NodePod, ...]:
    """The pods of a node with DRA that ask for our resources and got nothing: the kubelet starts
    them without."""
    return tuple(
        pod
        for pod in pods
        if not (pod.ended or pod.spec.extended_claim) and asks_for_ours(pod, names)
    )


DEVICE_MEND = (
    "the kubelet took the pod before it knew that this node has the resource (spec.nodeName is set "
    "or it is a static pod, so no scheduler waited for that): delete the pod, and create it once "
    "status.allocatable of the Node has the resource"
)


def pods_without_devices(
    pods: Iterable[NodePod],
    containers: Iterable[AllocatedContainer],
    records: Iterable[ClaimRecord],
    names: ResourceNames,
) -> tuple[NodePod, ...]:
    """The pods of a node with the device-plugin API that ask for our resources and have nothing of
    one: a kubelet takes a resource that it does not know for one that is no concern of nodes.
    *containers*: with devices, as read after *pods*. Who has a record has a GPU, also where the
    kubelet has forgotten that."""
    given = {(each.pod, str(each.resource)) for each in containers}
    recorded = {pod.uid for record in records for pod in record.pods}
    return tuple(
        pod
        for pod in pods
        if pod.acknowledged
        and not (pod.ended or pod.spec.extended_claim or pod.pod.uid in recorded)
        and any((pod.pod.uid, each) not in given for each in asks_for_ours(pod, names))
    )


FORGOTTEN_MEND = (
    "a container of such a pod that ends is not started again (no devices found allocated in local "
    "cache): delete the pod"
)


def forgotten_pods(
    pods: Iterable[NodePod],
    containers: Iterable[AllocatedContainer],
    records: Iterable[ClaimRecord],
) -> tuple[NodePod, ...]:
    """The pods that have devices by our records, and of which the kubelet does not know that any
    more: it has lost its checkpoint. *containers*: as above."""
    given = {(each.pod, each.resource) for each in containers}
    lost = {
        pod.uid
        for record in records
        if record.allocation
        for pod in record.pods
        if (pod.uid, record.allocation.resource) not in given
    }
    return tuple(
        pod for pod in pods if pod.pod.uid in lost and not pod.ended and pod.spec.deletion is None
    )


def asks_for_ours(pod: NodePod, names: ResourceNames) -> frozenset[str]:
    asked = (each for container in pod.spec.containers for each in container.asks_for)
    return frozenset(each for each in asked if names.include(each))
