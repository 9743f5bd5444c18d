"""Which claims a pod uses, and which of their devices each container gets: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice

Document = Mapping[str, Any]
Devices = Mapping[ClaimUid, Sequence[PreparedDevice]]


class NotYet(Exception):
    """The pod cannot start now; the message is what a pod event would say."""


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim of a pod; *name* is what the pod's containers call it."""

    name: str
    claim: str  # the object's name
    requests: Mapping[str, Sequence[str]] | None = None  # extended resource: by container


def pod_claims(pod: Document) -> tuple[PodClaim, ...]:
    """The claims of *pod*. NotYet: one of its templates has not become a claim yet."""
    status = pod.get("status") or {}
    made = {
        entry["name"]: entry.get("resourceClaimName")
        for entry in status.get("resourceClaimStatuses") or ()
    }
    claims = []
    for entry in pod["spec"].get("resourceClaims") or ():
        name = entry["name"]
        if direct := entry.get("resourceClaimName"):
            claims.append(PodClaim(name, direct))
        elif name not in made:
            raise NotYet(f"the claim for {name!r} was not created yet from its template")
        elif made[name]:  # without a name the pod needs no claim: types.go, PodResourceClaimStatus
            claims.append(PodClaim(name, made[name]))
    if extended := status.get("extendedResourceClaimStatus"):
        requests: dict[str, list[str]] = {}
        for mapping in extended.get("requestMappings") or ():
            requests.setdefault(mapping["containerName"], []).append(mapping["requestName"])
        claims.append(PodClaim("", extended["resourceClaimName"], requests))
    return tuple(claims)


def claim_ref(claim: Document, pod: Document) -> ClaimRef:
    """Which claim to prepare. NotYet: it is not allocated, or not for this pod."""
    metadata, status = claim["metadata"], claim.get("status") or {}
    name = f"{metadata['namespace']}/{metadata['name']}"
    if not status.get("allocation"):
        raise NotYet(f"resource claim {name} is not allocated")
    users = [user.get("uid") for user in status.get("reservedFor") or ()]
    if pod["metadata"]["uid"] not in users:
        raise NotYet(f"resource claim {name} is not reserved for this pod")
    return ClaimRef(metadata["namespace"], metadata["name"], ClaimUid(metadata["uid"]))


def drivers(claim: Document) -> tuple[str, ...]:
    """The drivers that have a device in the allocated *claim*."""
    devices = claim["status"]["allocation"].get("devices") or {}
    return tuple(sorted({result["driver"] for result in devices.get("results") or ()}))


def cdi_names(
    container: Document, claims: Sequence[tuple[PodClaim, ClaimUid]], devices: Devices
) -> tuple[str, ...]:
    """The CDI devices of one container, in the order of its claims (manager.go, GetResources)."""
    names: list[str] = []
    for entry in (container.get("resources") or {}).get("claims") or ():
        for pod_claim, uid in claims:
            if pod_claim.requests is None and pod_claim.name == entry["name"]:
                names += _names(devices[uid], entry.get("request", ""))
    for pod_claim, uid in claims:
        for request in (pod_claim.requests or {}).get(container["name"], ()):
            names += _names(devices[uid], request)
    return tuple(names)


def _names(devices: Sequence[PreparedDevice], request: str) -> list[str]:
    return [
        name
        for device in devices
        if not request or not device.requests or request in device.requests
        for name in device.cdi_ids
    ]
