"""What the values of settings look like, and what is said about one that looks otherwise."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from dra_driver.k8s.quantity import rounded_up

DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_DNS_LABEL_OR_NONE = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_RESOURCE = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
_RESOURCE_PREFIX = re.compile(r"^([A-Za-z0-9][-A-Za-z0-9_.]*)?\Z")
_LONGEST_PREFIX = 40  # of the 63 characters of a name: "1c.4g.96gb.gfx.shared" has to follow
_LONGEST_DOMAIN = 253 - len("requests.")  # that stands before it in a quota
_LEAST_SHARED_MEMORY = 1 << 20
FORMS = {
    "pod_uid": "write letters, digits and dashes",
    "revision_namespace": "write lower-case letters, digits and dashes",
    "profile": "write letters, digits, dashes, dots and underscores, as in a label's value",
}


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("give an absolute path: the kubelet and the container runtime use it too")
    return path


def _absolute_or_none(path: str) -> str:
    return str(_absolute(Path(path))) if path else path


def _memory(quantity: str) -> str:
    try:
        size = rounded_up(quantity)
    except ValueError:
        size = 0
    if size < _LEAST_SHARED_MEMORY:
        raise ValueError("write a size of at least 1Mi, such as 4Gi")
    return quantity


def _resource_name(name: str) -> str:
    return _of_a_domain(name, _RESOURCE, 63) if name else name


def _resource_prefix(prefix: str) -> str:
    return _of_a_domain(prefix, _RESOURCE_PREFIX, _LONGEST_PREFIX) if prefix else prefix


def _of_a_domain(name: str, form: re.Pattern[str], longest: int) -> str:
    """As the API server and the kubelet want the names of extended resources."""
    domain, slash, rest = name.partition("/")
    if not slash or not re.match(DNS_SUBDOMAIN, domain) or len(domain) > _LONGEST_DOMAIN:
        raise ValueError("write a domain in lowercase, a slash and a name, such as nvidia.com/gpu")
    if domain.endswith("kubernetes.io") or domain.startswith("requests."):
        raise ValueError(f"Kubernetes keeps the domain {domain} for itself; write another one")
    if not form.match(rest) or len(rest) > longest:
        raise ValueError(
            f"write at most {longest} letters, digits, dashes, dots and underscores after the "
            "slash, the first one a letter or a digit"
            + ("" if form is _RESOURCE_PREFIX else ", and the last one, too")
        )
    return name


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
OptionalPath = Annotated[str, AfterValidator(_absolute_or_none)]
NodeName = Annotated[str, StringConstraints(max_length=253, pattern=DNS_SUBDOMAIN)]
PodUidFlag = Annotated[
    str,
    StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9-]*$"),
    Field(
        description="the UID of this pod; with it, two plugins can serve at once during an update"
    ),
]
ProfileName = Annotated[str, StringConstraints(max_length=63, pattern=_LABEL_VALUE)]
RevisionNamespace = Annotated[
    str,
    StringConstraints(max_length=63, pattern=_DNS_LABEL_OR_NONE),
    Field(
        description="the namespace in which the controller keeps the revisions of NodeProfile "
        "objects; empty: those objects are not looked at"
    ),
]
DriverName = Annotated[
    str,
    StringConstraints(max_length=63, pattern=DNS_SUBDOMAIN),
    Field(description="the name of the driver"),
]
KubeletDirectory = Annotated[AbsolutePath, Field(description="the kubelet's root directory")]
Kubeconfig = Annotated[
    Path | None,
    Field(description="how to reach the API server; default: the pod's service account"),
]
ExtendedResourceName = Annotated[
    str,
    AfterValidator(_resource_name),
    Field(
        description="what pods ask for by the device-plugin API to get a GPU; empty: no GPU is "
        "offered by name"
    ),
]
SharedExtendedResourceName = Annotated[
    str,
    AfterValidator(_resource_name),
    Field(
        description="the same for replicas that the profile renames; empty: none of them is "
        "offered by name"
    ),
]
MigExtendedResourcePrefix = Annotated[
    str,
    AfterValidator(_resource_prefix),
    Field(
        description="the same for MIG instances: what stands before the name of their profile; "
        "empty: no instance is offered by name"
    ),
]
Quantity = Annotated[str, AfterValidator(_memory)]
HttpAddress = Annotated[
    str, Field(description="the address of /metrics, /livez and /readyz; empty: none")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], Field(description="how much to log")
]
LogFormat = Annotated[Literal["text", "json"], Field(description="the format of the log")]
NamespaceName = Annotated[str, StringConstraints(max_length=63, pattern=_DNS_LABEL)]
ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=DNS_SUBDOMAIN)]
