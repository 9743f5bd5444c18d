"""``dra-driver health``: which GPUs are sick; to say that they are well; to let go of them.

All of it is asked of the API server, with the rights of who asks. What is asked of a node is an
annotation of its Node, on which the plugin of the node acts.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from api import names
from api.names import (
    CLEAR_FAULTS_ANNOTATION,
    DEVICE_PLUGIN_ANNOTATION,
    RELEASE_ANNOTATION,
    RELEASED_ANNOTATION,
)
from api.strict import ConfigError
from dra_driver.base.errors import ApiServerError, Conflict, DriverError, NotFound, NotServed
from dra_driver.base.frozen import ordered
from dra_driver.cli.device_plugin_nodes import (
    device_plugin_node,
    device_plugin_nodes,
    pods_with_devices,
)
from dra_driver.cli.findings import abbreviated
from dra_driver.cli.terminal import format_table
from dra_driver.k8s.api import Document, KubernetesApi
from dra_driver.k8s.pods import PodReader
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.health import Problem
from dra_driver.model.offer import gpu_name_of
from dra_driver.plan.health.messages import action, meaning
from dra_driver.plan.health.problems import problem_of, taint_key
from dra_driver.plan.health.release import (
    ALL,
    NO_SUCH_GPU,
    Release,
    new_release,
    parse_release,
)

_POLL_SECONDS: Final = 0.5
_EVENTS: Final = "kubectl get events -n default --field-selector reason=GPUUnhealthy"
_MAX_SHOWN: Final = 20  # claims
_TRIES: Final = 5  # others write the Node, too


class HealthError(DriverError):
    """What was asked cannot be done now."""


class NoSuchGpuError(HealthError):
    """The node has no GPU of a name that was asked for."""


@ordered
class SickGpu:
    """One taint of devices of a GPU, for its health."""

    node: str
    gpu: str
    problem: str
    value: str
    effect: str
    since: str  # as the API server has it


class HealthCommand:
    """ApiServerError: the API server refuses, or does not answer. HealthError: the node does not do
    what is asked, and why."""

    def __init__(self, api: KubernetesApi, driver: str, wait_seconds: float = 60.0) -> None:
        """*wait_seconds*: for which the plugin of a node is waited for."""
        self._api = api
        self._resources = ResourceApi(api)
        self._driver = driver
        self._wait_seconds = wait_seconds

    def sick_gpus(self, node: str, output: str) -> str:
        """The GPUs with a taint for their health, on *node*; empty: on every node. *output*:
        ``table`` or ``json``. HealthError: *node* publishes nothing."""
        slices = self._slices(node)
        if not slices and (node or not self._resources.is_served()):
            raise HealthError(self._why_no_slices(node))
        devices_of: dict[SickGpu, list[str]] = defaultdict(list)
        for spec in slices:
            for device in spec.get("devices") or ():
                for sick in _health_taints(str(spec.get("nodeName")), device):
                    devices_of[sick].append(device["name"])
        sick_gpus = sorted(devices_of.items())
        if output == "json":
            found = [asdict(sick) | {"devices": devices} for sick, devices in sick_gpus]
            return json.dumps(found, indent=2)
        head = ("NODE", "GPU", "DEVICES", "PROBLEM", "SINCE", "EFFECT", "WHAT TO DO")
        table = format_table(head, [_row(sick, devices) for sick, devices in sick_gpus])
        answer = table if sick_gpus else "no GPU has a taint for its health"
        nodes = () if node else device_plugin_nodes(self._api)
        if others := sorted(each.name for each in nodes if each.is_ours):
            answer += f"\nby the device-plugin API, which has no taints: {', '.join(others)} "
            answer += f"({_EVENTS})"
        return answer

    def clear(self, node: str, gpus: Sequence[str]) -> str:
        """Say that *gpus* of *node* are well, and wait until its plugin has taken note."""
        request = _listed(gpus)
        self._ask_to_clear(node, request)
        self._wait(
            lambda: CLEAR_FAULTS_ANNOTATION not in self._annotations(node),
            lambda: f"the plugin of {node} has not taken note yet: is it running?",
        )
        done = f"{node}: {request}: cleared; what is still wrong stays (dra-driver health list)"
        uuids = self._uuids(node)
        if not uuids and request != ALL:
            return (
                f"{done}; {node} publishes no devices, so only the log of its plugin says whether "
                "it has such a GPU"
            )
        published = {ALL, *uuids, *uuids.values()}
        unknown = [word for word in request.split(",") if word not in published]
        return f"{done}; {node} publishes no {', '.join(unknown)}" if unknown else done

    def release(self, node: str, gpus: Sequence[str], seconds: float, force: bool = False) -> str:
        """Have *node* let go of *gpus* (none: all) for so long, and wait until it did. *force*:
        even if claims hold them, and in the place of another release."""
        release, before = self._request(node, gpus, seconds, force)
        try:
            self._wait_until_released(node, release)
        except NoSuchGpuError:  # else the node did without NVML for so long
            self._end(node, release, before)
            raise
        return (
            f"{node} has let go of {release.gpus} until {release.until}: end it earlier with "
            f"dra-driver health release --end --node-name {node}"
        )

    @contextmanager
    def released(
        self, node: str, gpus: Sequence[str], seconds: float, force: bool = False
    ) -> Iterator[Callable[[], None]]:
        """*node* has let go of *gpus*, up to the end of this context. What it yields is called
        every half of *seconds*: it goes on for so long from then."""
        release, earlier = self._request(node, gpus, seconds, force)

        def go_on() -> None:
            nonlocal release
            before, release = release, new_release(release.gpus, self._now() + seconds)
            self._ask(node, release, before)

        try:
            self._wait_until_released(node, release)
            yield go_on
        finally:
            self._end(node, release, earlier)

    def _request(
        self, node: str, gpus: Sequence[str], seconds: float, force: bool
    ) -> tuple[Release, str]:
        """What is asked for now, and what was before; empty: nothing."""
        asked = _listed(gpus) or ALL
        if not force:
            self._refuse_used(node)
            self._refuse_held(node, asked)
        release = new_release(asked, self._now() + seconds)
        return release, self._ask(node, release, force=force)

    def _wait_until_released(self, node: str, release: Release) -> None:
        self._wait(
            lambda: self._is_released(node, release),
            lambda: f"{node} has not let go yet{self._what_it_waits_for(node)}; it goes on trying",
        )

    def _is_released(self, node: str, release: Release) -> bool:
        """NoSuchGpuError: the plugin says that a name is wrong."""
        answer = self._annotations(node).get(RELEASED_ANNOTATION, "")
        waits = answer.removeprefix(f"{release} ")
        if waits != answer and waits.startswith(NO_SUCH_GPU):
            problem = waits.partition(";")[0]  # and what stays released
            raise NoSuchGpuError(
                f"{node}: {problem}: write gpu-0, a UUID or all; nothing more is released"
            )
        return answer == str(release) and self._is_tainted(node, release.gpus)

    def _ask(
        self, node: str, release: Release, before: Release | None = None, force: bool = False
    ) -> str:
        """Have *node* do it, instead of what it did *before*: the text of that, if it lasts.
        HealthError, unless *force* is set: it does it for somebody else, who would find his GPUs
        taken back."""
        for tries_left in reversed(range(_TRIES)):
            metadata = self._node(node)["metadata"]
            there = (metadata.get("annotations") or {}).get(RELEASE_ANNOTATION, "")
            if not force and there not in ("", str(before)) and self._lasts(there):
                raise HealthError(
                    f"{node} has let go of GPUs already ({there}): wait until that is over, end it "
                    f"with dra-driver health release --end --node-name {node}, or use --force"
                )
            try:
                wanted = {RELEASE_ANNOTATION: str(release)}
                self._annotate(node, wanted, metadata["resourceVersion"])
                return there if self._lasts(there) else ""
            except Conflict:
                if not tries_left:
                    raise
        return ""

    def _ask_to_clear(self, node: str, request: str) -> None:
        """Beside what somebody else asked for a moment before."""
        for tries_left in reversed(range(_TRIES)):
            metadata = self._node(node)["metadata"]
            there = (metadata.get("annotations") or {}).get(CLEAR_FAULTS_ANNOTATION, "")
            words = dict.fromkeys([*there.split(","), *request.split(",")])
            wanted = {CLEAR_FAULTS_ANNOTATION: ",".join(word for word in words if word)}
            try:
                return self._annotate(node, wanted, metadata["resourceVersion"])
            except Conflict:
                if not tries_left:
                    raise

    def _lasts(self, request: str) -> bool:
        """Whether the plugin acts on *request* now."""
        now = self._now()
        try:
            return parse_release(request, [], now).ends > now
        except ConfigError:
            return False

    def _end(self, node: str, release: Release, before: str) -> None:
        """Unless another release has taken its place. What was asked for *before* is again."""
        try:
            if self._annotations(node).get(RELEASE_ANNOTATION) in (None, str(release)):
                if self._lasts(before):
                    self._annotate(node, {RELEASE_ANNOTATION: before})
                else:
                    self.end(node)
        except ApiServerError as e:
            raise HealthError(
                f"{release.gpus} of {node} may stay released until {release.until}: end it earlier "
                f"with dra-driver health release --end --node-name {node}: {e}"
            ) from e

    def end(self, node: str) -> str:
        """Have *node* take its GPUs back, and wait until they answer."""
        self._annotate(node, {RELEASE_ANNOTATION: None})
        self._wait(
            lambda: RELEASED_ANNOTATION not in self._annotations(node),
            lambda: f"{node} does not have its GPUs back yet{self._what_it_waits_for(node)}",
        )
        return f"{node} has its GPUs back"

    def _refuse_held(self, node: str, asked: str) -> None:
        """HealthError: claims hold devices of these GPUs."""
        concerned = self._is_among(node, asked)

        def held(claim: Mapping[str, Any]) -> list[str]:
            status = claim.get("status") or {}
            results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
            ours = [
                result["device"]
                for result in results
                if result.get("driver") == self._driver and result.get("pool") == node
            ]
            if not any(map(concerned, ours)):
                return []
            pods = [str(each.get("name")) for each in status.get("reservedFor") or ()]
            metadata = claim["metadata"]
            return [f"{metadata['namespace']}/{metadata['name']} (pods: {abbreviated(pods)})"]

        try:
            claims = sorted(self._resources.claims(held))
        except NotServed:  # pods have devices by the device-plugin API only, then
            return
        if claims:
            more = [f"and {len(claims) - _MAX_SHOWN} more"] if len(claims) > _MAX_SHOWN else []
            raise HealthError(
                f"claims hold these GPUs of {node}: {', '.join(claims[:_MAX_SHOWN] + more)}: "
                "delete their pods first, or use --force"
            )

    def _refuse_used(self, node: str) -> None:
        """HealthError: pods have devices of *node* that only its kubelet knows."""
        plugin_node = device_plugin_node(self._node(node))
        if plugin_node is None and self._resources.is_served():
            return
        if plugin_node is None or plugin_node.use is None:
            no_condition = f"the Node has no condition {names.GPUS_ALLOCATED_BY} of that API"
            raise HealthError(
                f"the annotation {DEVICE_PLUGIN_ANNOTATION} of node {node} does not say what pods "
                f"ask for to get its GPUs ({plugin_node.problem if plugin_node else no_condition}),"
                " so it is not known which pods have some: is its plugin running? --force goes on "
                "in spite of that"
            )
        pods = ((node, pod) for pod in PodReader(self._api).on_node(node))
        if having := pods_with_devices(pods, {node: plugin_node.use.resources}):
            raise HealthError(
                f"pods have GPUs of {node} by the device-plugin API, which does not say which: "
                f"{abbreviated([pod for _, pod in having])}: delete them first, or use --force"
            )

    def _gives_devices_out(self, node: str) -> bool:
        """Whether pods get devices of *node* by the device-plugin API."""
        plugin_node = device_plugin_node(self._node(node))
        return bool(plugin_node and plugin_node.is_ours) or not self._resources.is_served()

    def _why_no_slices(self, node: str) -> str:
        if node and not self._gives_devices_out(node):
            return f"{node} publishes no devices of {self._driver}"
        return (
            f"{node or 'this cluster'} gives GPUs out by the device-plugin API, which says how "
            f"many are healthy, and not what is wrong with others: that is in events ({_EVENTS})"
        )

    def _is_tainted(self, node: str, asked: str) -> bool:
        """Whether no new pod gets a device of these GPUs: it is tainted, or not there."""
        concerned, key = self._is_among(node, asked), taint_key(Problem.RELEASED)
        return all(
            any(taint["key"] == key for taint in device.get("taints") or ())
            for spec in self._slices(node)
            for device in spec.get("devices") or ()
            if concerned(device["name"])
            and _attribute(device, names.TYPE) != names.TYPE_GPU_MONITOR
        )

    def _is_among(self, node: str, asked: str) -> Callable[[str], bool]:
        """Whether a device of *node* is of a GPU that is *asked* for by name or UUID."""
        words = set(asked.split(","))
        of_uuid = {name for uuid, name in self._uuids(node).items() if uuid in words}
        return lambda device: asked == ALL or gpu_name_of(device) in words | of_uuid

    def _uuids(self, node: str) -> Mapping[object, str]:
        """The GPUs that *node* publishes: the name by the UUID of the GPU, and of a partition."""
        return {
            _attribute(device, name): gpu_name_of(device["name"])
            for spec in self._slices(node)
            for device in spec.get("devices") or ()
            for name in (names.UUID, names.PARENT_UUID)
        }

    def _slices(self, node: str) -> list[Document]:
        """The specs of our slices on *node*; empty: on every node."""
        try:
            return [each["spec"] for each in self._resources.slices(self._driver, node)[0]]
        except NotServed:  # by which GPUs are given out is the device-plugin API, then
            return []

    def _what_it_waits_for(self, node: str) -> str:
        words = self._annotations(node).get(RELEASED_ANNOTATION, "").split(maxsplit=2)
        return f" ({words[2]})" if len(words) > 2 else ": is its plugin running?"

    def _annotations(self, node: str) -> Mapping[str, str]:
        return self._node(node)["metadata"].get("annotations") or {}

    def _node(self, node: str) -> Document:
        try:
            return self._api.get(f"/api/v1/nodes/{node}")
        except NotFound as e:
            raise HealthError(f"there is no node {node}: name one with --node-name") from e

    def _annotate(
        self, node: str, annotations: Mapping[str, str | None], version: str = ""
    ) -> None:
        """*version*: of the Node that was read; Conflict: it is another one by now."""
        metadata: dict[str, object] = {"annotations": dict(annotations)}
        if version:
            metadata["resourceVersion"] = version
        try:
            self._api.patch(f"/api/v1/nodes/{node}", {"metadata": metadata})
        except NotFound as e:
            raise HealthError(f"there is no node {node}: name one with --node-name") from e

    def _now(self) -> float:
        return self._api.now() or time.time()

    def _wait(self, is_done: Callable[[], bool], why: Callable[[], str]) -> None:
        """HealthError: it is not done in time, and *why*."""
        deadline = time.monotonic() + self._wait_seconds
        while not is_done():
            if time.monotonic() > deadline:
                raise HealthError(why())
            time.sleep(_POLL_SECONDS)


def _listed(gpus: Collection[str]) -> str:
    """As the annotation has them; empty: none is named. HealthError: one of them is no name."""
    words = [word for text in gpus for word in text.split(",")]
    for word in words:
        if not word.replace("-", "").isalnum():
            raise HealthError(f"{word!r} names no GPU: write gpu-0, a UUID or all")
        if word.startswith("MIG-") or (word.startswith("gpu-") and gpu_name_of(word) != word):
            raise HealthError(f"{word!r} is a part of a GPU: write the name of the GPU, as gpu-0")
    return ALL if ALL in words else ",".join(dict.fromkeys(words))


def _health_taints(node: str, device: Document) -> Iterator[SickGpu]:
    for taint in device.get("taints") or ():
        if problem := problem_of(str(taint["key"])):
            yield SickGpu(
                node,
                gpu_name_of(device["name"]),
                problem.value,
                str(taint.get("value") or ""),
                str(taint["effect"]),
                str(taint.get("timeAdded") or ""),
            )


def _row(sick: SickGpu, devices: Sequence[str]) -> Sequence[str]:
    problem = Problem(sick.problem)
    return (
        sick.node,
        sick.gpu,
        abbreviated(devices),
        meaning(problem, sick.value),
        sick.since,
        sick.effect,
        action(problem, sick.value),
    )


def _attribute(device: Document, name: str) -> object:
    value = (device.get("attributes") or {}).get(name) or {}
    return next(iter(value.values()), None)
