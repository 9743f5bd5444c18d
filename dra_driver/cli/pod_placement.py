"""Which pods that ask for GPUs without a claim can never be scheduled, and why.

As with claims only what is certain is told. A resource that a device plugin offers on some node is
that plugin's business.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dra_driver.cli.candidates import candidates, is_ours
from dra_driver.cli.extended_resources import IMPLICIT, Amount, amounts_of, classes_of
from dra_driver.cli.market import Market
from dra_driver.cli.placement import unservable
from dra_driver.cli.requests import Request

Document = Mapping[str, Any]

_FAMILIES = ("nvidia.com/gpu", "nvidia.com/mig-")  # as device plugins for these GPUs call them


@dataclass(frozen=True, slots=True)
class PodVerdict:
    """Of the waiting pods, how many were judged, and those that wait in vain, by the reason."""

    judged: int
    problems: Mapping[str, tuple[str, ...]]  # their namespaces and names


def asks_for_gpus(pod: Document) -> bool:
    """Whether the scheduler has yet to find a node for *pod*, and it may be for us to serve."""
    waits = not pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("nodeName")
    return waits and bool(amounts_of(pod))


def judge_pods(pods: Iterable[Document], market: Market, plugins: Collection[str]) -> PodVerdict:
    """*pods*: those that ``asks_for_gpus`` accepts; *plugins*: the resources that nodes have of
    device plugins."""
    classes = classes_of(market.classes)

    @cache  # all pods of one owner ask for the same
    def judgement(amounts: tuple[Amount, ...]) -> tuple[bool, str]:
        ours = [one for one in amounts if _is_ours(one, classes, market)]
        return bool(ours), _why_not(ours, classes, market)

    judged = 0
    problems: dict[str, list[str]] = {}
    for pod in pods:
        amounts = tuple(one for one in amounts_of(pod) if one.resource not in plugins)
        for_us, why = judgement(amounts)
        judged += for_us
        if why:
            name = f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"
            problems.setdefault(why, []).append(name)
    return PodVerdict(judged, {why: tuple(sorted(found)) for why, found in problems.items()})


def to_be_had(market: Market) -> Iterator[str]:
    """The resources that pods can ask for, each of which some device serves."""
    for name, device_class in sorted(classes_of(market.classes).items()):
        request = _request(Amount("", name, 1), device_class)
        if name.startswith(IMPLICIT) or not is_ours(request, market):
            continue
        if not candidates(request, market)[1]:
            yield name


def _is_ours(amount: Amount, classes: Mapping[str, str], market: Market) -> bool:
    """One that no DeviceClass serves goes by its name."""
    name = amount.resource
    if name in classes:
        return is_ours(_request(amount, classes[name]), market)
    implicit = name.startswith(IMPLICIT) and f".{name.removeprefix(IMPLICIT)}"
    return name.startswith(_FAMILIES) or bool(implicit and implicit.endswith(f".{market.driver}"))


def _why_not(amounts: list[Amount], classes: Mapping[str, str], market: Market) -> str:
    nobodys = [one for one in amounts if one.resource not in classes]
    if nobodys:
        return "; ".join(_no_class(one) for one in nobodys)
    requests = [[_request(one, classes[one.resource])] for one in amounts]
    return unservable(requests, market, "its containers together")


def _no_class(amount: Amount) -> str:
    if amount.resource.startswith(IMPLICIT):
        return f"{amount}: there is no DeviceClass {amount.resource.removeprefix(IMPLICIT)}"
    return f"{amount}: no DeviceClass has it as its extendedResourceName, and no node offers it"


def _request(amount: Amount, device_class: str) -> Request:
    asked = {"deviceClassName": device_class, "count": amount.count}
    return Request(str(amount), asked, str(amount), has_fields=False)
