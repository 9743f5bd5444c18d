"""What a container can read about the devices of its claims: the documents of KEP-5304 (pure).

One document per request of a claim, at a place that a program in the container knows beforehand.
It is the same object in each version of the API, newest first, one a line; a reader takes the
first that it understands. A request for one of several alternatives is "gpu" in paths and
"gpu/large" inside.

A document never changes: a claim that is allocated anew is taken back first. Its generation is 1.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from dra_driver.base.errors import ClaimError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import Claim, ClaimUid

METADATA_VERSIONS: Final = ("v1beta1", "v1alpha1")  # Kubernetes 1.37, 1.36; newest first
METADATA_GROUP: Final = "metadata.resource.k8s.io"
METADATA_CONTAINER_DIRECTORY: Final = "/var/run/kubernetes.io/dra-device-attributes"

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@frozen
class MetadataDevice:
    """One device of a claim, as its user reads of it.

    *attributes*: qualified name to value as in a ResourceSlice of v1 (``{"string": "…"}``), 32 at
    most.
    """

    request: str  # in full: "gpu", or "gpu/large"
    pool: str
    device: str
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@frozen
class MetadataDocument:
    """What a container can read about the devices of one request."""

    request: str  # without subrequest
    host_path: str
    container_path: str
    text: str


def render_metadata_documents(
    claim: Claim, devices: Sequence[MetadataDevice], driver: str, directory: str
) -> tuple[MetadataDocument, ...]:
    """The documents of *claim*, to be kept in *directory* of the host, sorted by request.

    ClaimError: the annotation that names the pod's claim, which users can write, is no name.
    """
    name = claim.pod_claim_name
    if name and not _LABEL.fullmatch(name):
        raise ClaimError(
            f"claim {claim.ref}: annotation resource.kubernetes.io/pod-claim-name is {name!r}, "
            "which names no claim of a pod; remove the annotation, or let a ResourceClaimTemplate "
            "make the claim"
        )
    return tuple(
        MetadataDocument(
            request,
            f"{directory}/{metadata_file_name(claim.ref.uid, request)}",
            container_path(claim, request, driver),
            _text(claim, [device for device in devices if _base(device) == request], driver),
        )
        for request in sorted({_base(device) for device in devices})
    )


def metadata_file_name(uid: ClaimUid, request: str) -> str:
    """How the document of a request, without its subrequest, is called on the host.

    >>> metadata_file_name(ClaimUid("0b7e"), "gpu")
    '0b7e_gpu.json'
    """
    return f"{uid}_{request}.json"


def claim_uid_of_file(name: str) -> ClaimUid | None:
    """Whose document the file *name* is. None: it is no document.

    >>> claim_uid_of_file("0b7e_gpu.json")
    '0b7e'
    >>> claim_uid_of_file("gpu.json")
    """
    uid, separator, request_part = name.partition("_")
    return ClaimUid(uid) if uid and separator and request_part.endswith(".json") else None


def container_path(claim: Claim, request: str, driver: str) -> str:
    """Where the document is in a container, for a request without its subrequest.

    >>> from dra_driver.k8s.claims import ClaimRef
    >>> ref = ClaimRef("ml", "train-gpu-x7k2p", ClaimUid("0b7e"))
    >>> container_path(Claim(ref, (), pod_claim_name="gpu"), "one", "x.example")[45:]
    'resourceclaimtemplates/gpu/one/x.example-metadata.json'
    >>> container_path(Claim(ref, ()), "one", "x.example")[45:]
    'resourceclaims/train-gpu-x7k2p/one/x.example-metadata.json'
    """
    if claim.pod_claim_name:  # nobody in a pod can know the name that its claim was given
        place = f"resourceclaimtemplates/{claim.pod_claim_name}"
    else:
        place = f"resourceclaims/{claim.ref.name}"
    return f"{METADATA_CONTAINER_DIRECTORY}/{place}/{request}/{driver}-metadata.json"


def _base(device: MetadataDevice) -> str:
    return device.request.partition("/")[0]


def _text(claim: Claim, devices: Sequence[MetadataDevice], driver: str) -> str:
    content = json.dumps(_content(claim, devices, driver), ensure_ascii=False)
    return "".join(
        f'{{"kind": "DeviceMetadata", "apiVersion": "{METADATA_GROUP}/{version}", {content[1:]}\n'
        for version in METADATA_VERSIONS
    )


def _content(claim: Claim, devices: Sequence[MetadataDevice], driver: str) -> dict[str, Any]:
    """What is the same in each version."""
    content: dict[str, Any] = {
        "metadata": {
            "name": claim.ref.name,
            "namespace": claim.ref.namespace,
            "uid": claim.ref.uid,
            "generation": 1,
        },
    }
    if claim.pod_claim_name:
        content["podClaimName"] = claim.pod_claim_name
    names = dict.fromkeys(device.request for device in devices)
    content["requests"] = [
        {
            "name": name,
            "devices": [_device(device, driver) for device in devices if device.request == name],
        }
        for name in names
    ]
    return content


def _device(device: MetadataDevice, driver: str) -> dict[str, Any]:
    document: dict[str, Any] = {"driver": driver, "pool": device.pool, "name": device.device}
    if device.attributes:
        document["attributes"] = {
            name: device.attributes[name] for name in sorted(device.attributes)
        }
    return document
