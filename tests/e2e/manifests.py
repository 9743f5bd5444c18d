"""Pods and claims as short as tests need them."""

from typing import Any

Document = dict[str, Any]

BUSYBOX = "dra.test/busybox:1"
GLIBC = "dra.test/glibc:1"
CLASS = "gpu.nvidia.com"
SLEEP = "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"


def request(name: str = "gpu", cel: str = "", **fields: Any) -> Document:
    """One request for a GPU."""
    exactly: Document = {"deviceClassName": CLASS, **fields}
    if cel:
        exactly["selectors"] = [{"cel": {"expression": cel}}]
    return {"name": name, "exactly": exactly}


def fraction(memory: str, name: str = "gpu", cel: str = "", **fields: Any) -> Document:
    """One request for a part of a GPU: as much of its memory."""
    return request(name, cel, capacity={"requests": {"memory": memory}}, **fields)


def on(uuid: str) -> str:
    """The selector of one GPU."""
    return f"device.attributes['{CLASS}'].uuid == '{uuid}'"


def sharing(strategy: str = "TimeSlicing", *requests: str, **fields: Any) -> Document:
    """A configuration of a claim: what happens on the GPUs of *requests*, or of all."""
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy, **fields},
    }
    opaque = {"driver": CLASS, "parameters": parameters}
    return {"requests": list(requests), "opaque": opaque}


def interval(word: str, *requests: str) -> Document:
    return sharing("TimeSlicing", *requests, timeSlicingConfig={"interval": word})


ANY_INTERVAL = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{timeSliceInterval: Any}]}
"""  # a fraction sets the interval of its GPU, too


def claim(name: str, *requests: Document, **spec: Any) -> Document:
    devices = {"requests": list(requests) or [request()], **spec}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": devices},
    }


def template(name: str, *requests: Document, **spec: Any) -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": claim(name, *requests, **spec)["spec"]},
    }


def container(
    command: str = SLEEP, name: str = "main", uses: tuple[Document, ...] = (), image: str = BUSYBOX
) -> Document:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "resources": {"claims": list(uses)},
    }


def old_way(name: str, command: str, **limits: str) -> Document:
    """A pod that names what it wants as a device plugin's users do."""
    asking = container(command)
    asking["resources"] = {"limits": limits}
    return pod_of(name, [asking], [])


def pod(
    name: str,
    command: str = SLEEP,
    claim: str = "",
    template: str = "",
    image: str = BUSYBOX,
) -> Document:
    """A pod of one container; with the claim *claim*, or one of its own from *template*."""
    source = {"resourceClaimName": claim} if claim else {"resourceClaimTemplateName": template}
    claims = [{"name": "gpu", **source}] if claim or template else []
    uses = ({"name": "gpu"},) if claims else ()
    return pod_of(name, [container(command, uses=uses, image=image)], claims)


def pod_of(name: str, containers: list[Document], claims: list[Document], **spec: Any) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            # No network and no token of its own: they take a seventh of a pod's CPU time.
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "containers": containers,
            "resourceClaims": claims,
            **spec,
        },
    }
