"""Requests that wait because devices are tainted, as those of sick GPUs are.

A taint goes once what is wrong is over: what waits for that alone can be served then. Whether
claims hold the devices without taints is not asked.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dra_driver.cli.doctor.scheduling.candidates import (
    DeviceRequest,
    candidates,
    is_ours,
    untolerated_taints,
)
from dra_driver.cli.doctor.scheduling.published_devices import PublishedDevice, PublishedDevices
from dra_driver.cli.findings import abbreviated
from dra_driver.plan.health.messages import action, meaning
from dra_driver.plan.health.problems import problem_of

Document = Mapping[str, Any]

ADVICE = (
    "do for the GPUs what is said of them; the checks 'GPU health' and 'tainted devices' say more; "
    "a claim that is to have such a device all the same has to tolerate its taint"
)


def waits_for_taints(
    requests: Sequence[Sequence[DeviceRequest]], published: PublishedDevices
) -> str:
    """Why no node can serve all of *requests*, each as the ways to serve it, before taints go;
    empty: some node may."""
    reasons = (_why_tainted(ways, published) for ways in requests)
    return "; ".join(reason for reason in reasons if reason)


def _why_tainted(ways: Sequence[DeviceRequest], published: PublishedDevices) -> str:
    reasons = []
    for way in ways:
        if not is_ours(way, published):
            return ""
        devices, never = candidates(way, published)
        if never:
            continue
        tainted = [device for device in devices if untolerated_taints(way, device)]
        if _is_served(way, devices, tainted):
            return ""
        reasons.append(f"{way.path}: {abbreviated(_described(way, tainted), '; ')}")
    return "; ".join(reasons)


def _is_served(
    request: DeviceRequest,
    devices: Sequence[PublishedDevice],
    tainted: Sequence[PublishedDevice],
) -> bool:
    """Whether the others of some node are enough. Who asks for all devices of a node gets none
    where one is tainted."""
    on_node = Counter(device.node for device in devices)
    tainted_on_node = Counter(device.node for device in tainted)
    if request.every:
        return any(node not in tainted_on_node for node in on_node)
    return any(on_node[node] - tainted_on_node[node] >= request.count for node in on_node)


def _described(request: DeviceRequest, tainted: Sequence[PublishedDevice]) -> Iterator[str]:
    """Each taint with the devices that have it, what it means and what to do."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for device in tainted:
        for taint in untolerated_taints(request, device):
            places[device.node, _taint_text(taint)].append(device.name)
    for (node, text), names in places.items():
        yield f"{abbreviated(names)} on {node} {'is' if len(names) == 1 else 'are'} tainted: {text}"


def _taint_text(taint: Document) -> str:
    """As kubectl writes taints, and in words."""
    key, value = str(taint["key"]), str(taint.get("value") or "")
    text = f"{key}{f'={value}' if value else ''}:{taint['effect']}"
    if (problem := problem_of(key)) is None:
        return text
    return f"{text} ({meaning(problem, value)}; {action(problem, value)})"
