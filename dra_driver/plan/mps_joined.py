"""Pods that join a claim under MPS after it was prepared: what of it their containers cannot use.

The kubelet prepares a claim for its first pod and asks nothing for those that come later, so they
cannot be refused. What a container is given follows from the claim's CDI file: a program reaches
the one MPS server that its environment names, and sees the GPUs of that server and no others.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import cdi
from dra_driver.kubeletplugin.claims import Pod
from dra_driver.kubeletplugin.pods import ContainerSpec, PodSpec
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Record
from dra_driver.model.offer import board
from dra_driver.model.profiles import Tenants
from dra_driver.plan.mps_claims import apart_problems, has_gpus, served_requests, tenants_of
from dra_driver.plan.mps_containers import tenant_problems

_OURS = "CUDA_MPS_"


@dataclass(frozen=True, slots=True)
class Joined:
    """A pod that uses a prepared claim, and may use it otherwise than the claim's first pod."""

    record: Record
    pod: Pod


@dataclass(frozen=True, slots=True)
class Given:
    """A device of a claim, as a container gets it with its requests."""

    requests: tuple[str, ...]
    gpu: str  # or the MIG partition
    mps: tuple[str, ...]  # the variables that lead to a server; empty: it is not under MPS


def to_look_at(records: Iterable[Record]) -> tuple[Joined, ...]:
    """Whose spec matters: the claim has several requests or is not for everybody, or the pod may
    have GPUs of other claims.

    Who prepared a claim is looked at again: nobody remembers which pod it was.
    """
    known = [record for record in records if record.completed and has_gpus(record)]
    uses = Counter(pod.uid for record in known for pod in record.pods)
    unnoticed = {record.claim.namespace for record in known if _is_joined_unnoticed(record)}
    return tuple(
        Joined(record, pod)
        for record in known
        if record.spaces
        for pod in record.pods
        if uses[pod.uid] > 1
        or record.claim.namespace in unnoticed
        or len({one.requests for one in record.prepared or ()}) > 1
        or tenants_of(record) is not Tenants.ANY
    )


def _is_joined_unnoticed(record: Record) -> bool:
    """Nobody looks which pods come to it later (``plugin.pod_limits``)."""
    return not (record.pod_claim_name or record.limited or record.spaces)


def given(record: Record) -> tuple[Given, ...]:
    """What containers get of a claim, but for what only looks on. *record*: the whole of it."""
    return tuple(_given(record))


def kept_out(joined: Joined, spec: PodSpec) -> Sequence[str]:
    """The pod's containers that the profile does not let use the claim, in words."""
    record = joined.record
    return tenant_problems(tenants_of(record), record.claim, spec, served_requests(record))


def not_served(
    joined: Joined, spec: PodSpec, given: Sequence[Given], records: Iterable[Record]
) -> Sequence[str]:
    """What the pod's containers cannot use of the claim, in words. *given*: of the claim."""
    return (
        *(f"{said}; its clients are ended" for said in kept_out(joined, spec)),
        *apart_problems(joined.record, _others(joined, records), [spec]),
        *(
            f"pod {spec.namespace}/{spec.name}, container {container.name!r} {problem}"
            for container in spec.containers
            for problem in _problems(given, _requests(container, joined.record.claim.name))
        ),
    )


def _others(joined: Joined, records: Iterable[Record]) -> Iterator[Record]:
    """The prepared claims that the pod may use, but for those of which it is told of this one."""
    for record in records:
        its = any(one.uid == joined.pod.uid for one in record.pods)
        told = its and record.claim < joined.record.claim and record.spaces
        if record.completed and not told:
            yield record


def _requests(container: ContainerSpec, claim: str) -> frozenset[str]:
    """Of the claim; "" is all of them."""
    return frozenset(request for name, request in container.uses if name == claim)


def _given(record: Record) -> Iterator[Given]:
    holdings = {(holding.device, holding.share): holding for holding in record.holdings}
    try:
        spec = cdi.from_text(record.spec or "")
    except cdi.CdiError:  # it is written anew when the claim is prepared
        return
    edits = {device.name: device.container_edits for device in spec.devices}
    for one in record.prepared or ():
        names = [cdi.parse_name(id_).device for id_ in one.cdi_ids]
        env = [entry for name in names if name in edits for entry in edits[name].env]
        holding = holdings.get((DeviceName(one.device), one.share))
        if holding is None or not holding.admin:
            mps = tuple(sorted(entry for entry in env if entry.startswith(_OURS)))
            yield Given(one.requests, holding.unit if holding else board(one.device), mps)


def _problems(given: Sequence[Given], requests: frozenset[str]) -> Iterator[str]:
    mine = [one for one in given if "" in requests or requests & set(one.requests)]
    under = [one for one in mine if one.mps]
    if not under:
        return
    if len(under) < len(mine):
        yield (
            f"uses {_gpus(under)} under MPS and {_gpus(one for one in mine if not one.mps)} "
            "without: a program under MPS sees no other GPU; use them in different containers"
        )
    if len({one.mps for one in under}) > 1:
        yield (
            f"uses requests {_list(name for one in under for name in one.requests)} together, "
            "which were prepared for containers that use them apart, and a program reaches one "
            "MPS server; use one of them in each container, or write a claim for each pod"
        )
        return
    (mps,) = {one.mps for one in under}
    everything = [one for one in given if one.mps == mps]
    if {one.gpu for one in everything} != {one.gpu for one in under}:
        yield (
            f"uses {_gpus(under)} under MPS, and its MPS server is over {_gpus(everything)}: let "
            "all pods of the claim use the same requests, or write a claim for each"
        )


def _gpus(given: Iterable[Given]) -> str:
    return _list(one.gpu for one in given)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
