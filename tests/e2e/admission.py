"""The admission policy on configurations, and what becomes of objects that have some."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from dra_driver.base.errors import Refused
from tests.e2e.kube import GROUP, Document, Kube, wait
from tests.e2e.manifests import CLASS

POLICY = "dra-driver-gpu-claim-configs"
BINDING = "ValidatingAdmissionPolicyBinding"
PLACES = {
    "ResourceClaim": "spec.devices.config",
    "ResourceClaimTemplate": "spec.spec.devices.config",
    "DeviceClass": "spec.config",
}


def written(
    kind: str,
    *parameters: Any,
    version: str = "v1",
    drivers: Sequence[str] = (),
    name: str = "judged",
) -> Document:
    """An object with one configuration for each of *parameters*; of our driver, unless said."""
    config = [
        {"opaque": {"driver": driver, "parameters": each}}
        for driver, each in zip(drivers or [CLASS] * len(parameters), parameters, strict=True)
    ]
    asked = {"deviceClassName": CLASS}
    request = {"name": "gpu", **(asked if version == "v1beta1" else {"exactly": asked})}
    claim = {"devices": {"requests": [request], "config": config}}
    specs = {
        "ResourceClaim": claim,
        "ResourceClaimTemplate": {"spec": claim},
        "DeviceClass": {"config": config},
    }
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": kind,
        "metadata": {"name": name},
        "spec": specs[kind],
    }


def path_of(kube: Kube, document: Document) -> str:
    """Where objects of its kind and version are created."""
    version = document["apiVersion"].rpartition("/")[2]
    return kube.path(document["kind"], "default").replace("/v1/", f"/{version}/", 1)


def denial(kube: Kube, document: Document) -> str:
    """What the policy says when *document* is applied; empty: it would be created."""
    try:
        kube.api.create(path_of(kube, document), document, {"dryRun": "All"})
    except Refused as e:
        return words_of(str(e))
    return ""


def words_of(message: str) -> str:
    """What the policy said, of all that the API server said."""
    opening = f"ValidatingAdmissionPolicy '{POLICY}' with binding '{POLICY}' denied request: "
    assert opening in message, message
    return message.partition(opening)[2].rstrip("\n")


def with_paths(words: str, kind: str = "ResourceClaim", number: int = 0) -> str:
    """*words* with the path of the configuration before each field."""
    path = f"{PLACES[kind]}[{number}].opaque.parameters"
    return "; ".join(path + part if part.startswith(".") else part for part in words.split("; "))


def wait_enforced(kube: Kube) -> None:
    """Until the API server has taken notice of the policy."""
    wait("the policy to be enforced", lambda: denial(kube, written("ResourceClaim", {})), 30)


@contextlib.contextmanager
def not_enforced(kube: Kube) -> Iterator[None]:
    """As before the policy was installed."""
    binding = kube.get(BINDING, POLICY)
    kube.delete(BINDING, POLICY)
    try:
        wait("the policy to rest", lambda: not denial(kube, written("ResourceClaim", {})), 30)
        yield
    finally:
        # With the annotations: helm would leave behind what does not say whose release it is.
        metadata = {key: binding["metadata"][key] for key in ("name", "labels", "annotations")}
        kube.apply({**binding, "metadata": metadata})
        wait_enforced(kube)


def text_of(name: str, parameters: str, count: int) -> str:
    """A claim with *count* configurations, of *parameters* as text: Python writes no JSON of 5,000
    levels."""
    text = json.dumps(written("ResourceClaim", *["PARAMETERS"] * count, name=name))
    return text.replace('"PARAMETERS"', parameters)
