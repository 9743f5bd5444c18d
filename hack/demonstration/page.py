"""What is shown in the end, from what was seen: text for a terminal, at most 60 lines of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hack.testbed.images import GLIBC

Document = Mapping[str, Any]

ATTRIBUTES = ("productName", "uuid", "architecture", "cudaComputeCapability", "driverVersion")
_NAMED = ("/nvidia-smi", "/libcuda.so.1", "/libnvidia-ml.so.1")  # of many files


@dataclass(frozen=True, slots=True)
class Style:
    """How a terminal is told to make text bold and faint; plain where it is not told."""

    bold: str = ""
    dim: str = ""
    normal: str = ""

    def strong(self, text: str) -> str:
        return f"{self.bold}{text}{self.normal}"

    def faint(self, text: str) -> str:
        return f"{self.dim}{text}{self.normal}"


@dataclass(frozen=True, slots=True)
class Findings:
    """A pod that runs with a GPU, and everything on the way to it, as the programs printed it."""

    version: str  # of Kubernetes
    sim: str
    why: str | None  # no containers can run here
    log: str
    claim: Document  # ResourceClaim
    resource_slice: Document  # the ResourceSlice of its device
    claim_spec: tuple[str, Document]  # path and content of the CDI spec
    driver_spec: tuple[str, Document]  # the same, of what every container gets of the driver
    quarters: Mapping[str, str]  # what pods printed that share a GPU, by namespace and name
    claims_table: str


@dataclass(frozen=True, slots=True)
class Servers:
    """Pods that share a GPU by MPS, as the programs printed it."""

    version: str  # of Kubernetes
    why: str | None  # no containers can run here
    logs: Mapping[str, str]  # by namespace and name of the pod
    claims_table: str


@dataclass(frozen=True, slots=True)
class Partitions:
    """Pods with partitions that were created for them, as the programs printed it."""

    version: str  # of Kubernetes
    why: str | None  # no containers can run here
    logs: Mapping[str, str]  # by namespace and name of the pod
    during: str  # how the GPUs are divided
    after: str  # the same once the pods are gone


def servers_page(servers: Servers, style: Style) -> str:
    """What each container has of the GPU, and how the node sees it."""
    title = "Two servers with 30 and 70 percent of one GPU, under MPS,"
    holdings = ("Who holds what, and what is free", "dra-driver claims", servers.claims_table)
    return _pods_page(title, servers, [holdings], style)


def partitions_page(partitions: Partitions, style: Style) -> str:
    """What each container has of a GPU that was divided for it, and what becomes of that."""
    command = "dra-driver devices --profile mig"
    pictures = [
        ("How the GPUs are divided now", command, partitions.during),
        ("And once the pods are gone", command, partitions.after),
    ]
    return _pods_page(
        "Two pods with MIG partitions that nobody created before,", partitions, pictures, style
    )


def _pods_page(
    pods: str, view: Servers | Partitions, more: Sequence[tuple[str, str, str]], style: Style
) -> str:
    title = style.strong(f"{pods} on Kubernetes {view.version}; GPUs are simulated")
    if view.why:
        title += f"\nThe pods are processes without a container: {view.why}"
    logs = [
        (f"What pod {pod.partition('/')[2]} sees", f"kubectl logs -n {pod.replace('/', ' ')}", log)
        for pod, log in view.logs.items()
    ]
    return "\n\n".join([title, *(_block(*each, style) for each in (*logs, *more))])


def page(view: Findings, style: Style) -> str:
    """The road of one GPU, from the container back to the node that offers it."""
    meta = view.claim["metadata"]
    result = view.claim["status"]["allocation"]["devices"]["results"][0]
    name = f"{meta['namespace']}/{meta['name']}"
    sections = [
        ("What the pod printed", f"kubectl logs -n {meta['namespace']} one-gpu", view.log),
        (
            "The GPU it was given",
            f"kubectl get resourceclaims -n {meta['namespace']}",
            f"claim {name}\n"
            f"request {result['request']!r} <- device {result['device']} "
            f"of pool {result['pool']}, driver {result['driver']}",
        ),
        (
            "The ResourceSlice it came from",
            "kubectl get resourceslices -o yaml",
            _slice_lines(view.resource_slice, str(result["device"])),
        ),
        ("The CDI spec of the claim", view.claim_spec[0], _spec_lines(view.claim_spec[1])),
        ("The CDI spec of the driver", view.driver_spec[0], _spec_lines(view.driver_spec[1])),
    ]
    if view.quarters:
        source = "kubectl logs -n NAMESPACE POD"
        sections.append(("Pods of three namespaces on one GPU", source, _logs(view.quarters)))
    sections.append(("Who holds what, and what is free", "dra-driver claims", view.claims_table))
    pods = "One pod with one GPU" + (", three that share one," if view.quarters else "")
    title = style.strong(f"{pods} on Kubernetes {view.version}; GPUs are simulated")
    if view.why:
        title += f"\nThe pod is a process without a container: {view.why}"
    blocks = [_block(head, source, body, style) for head, source, body in sections]
    return "\n\n".join([title, *blocks])


def sharing(quarters: Mapping[str, str]) -> str:
    """What became of the pods that share a GPU, in a line."""
    if quarters:
        return f"running: {', '.join(quarters)}"
    return "left out: it takes two GPUs, and Kubernetes 1.36"


def left_running(kubeconfig: str, path: str, pod: str, doctor: str) -> str:
    """What to type while it is left running. *pod*: one to look into, by namespace and name; empty:
    none can be. *doctor*: the command."""
    lines = [
        "It is left running. To look around:",
        "",
        f"  export KUBECONFIG={kubeconfig} PATH={path}:$PATH",
        "  kubectl get pods,resourceclaims --all-namespaces",
        "  kubectl get resourceslices -o yaml",
        f"  {doctor}",
    ]
    if pod:
        lines.append(f"  kubectl exec -n {pod.replace('/', ' ')} -- nvidia-smi")
        lines.append(f"The node reaches no registry: pods of your own take the image {GLIBC}.")
    return "\n".join(
        [
            *lines,
            "",
            "To end it and remove everything:  hack/demo --down (the next hack/demo does, too)",
        ]
    )


def ended() -> str:
    """What to type next, after it was removed."""
    rows = [
        ("hack/demo --keep", "the same, left running, for you to look around"),
        ("hack/demo --mps", "two pods with 30 and 70 percent of a GPU, at the same time"),
        ("hack/demo --mig", "MIG partitions that are created for pods, and removed again"),
        ("hack/demo --sim mixed", "other GPUs: a100x8, b200x8, h200x8, l40sx4, t4x1, ..."),
        ("dra-driver devices --sim h100x8", "what a node offers; .venv/bin has the program"),
        ("hack/cluster up", "this Kubernetes alone; hack/cluster kubectl -- get nodes"),
        ("hack/test", "every test, the end-to-end tests on this Kubernetes too"),
        ("deploy/examples/README.md", "other ways to ask for GPUs, one idea each"),
    ]
    return "\n".join(["Next:", "", *(f"  {command:33}{text}" for command, text in rows)])


def limits(why: str) -> str:
    """What is different where no containers can run."""
    return (
        f"No containers can run here ({why}).\n"
        "The control plane, the scheduler and the driver are real; a stand-in for the kubelet\n"
        "runs the pod's command as a plain process of yours. It gets its GPU by the same CDI\n"
        "spec, but nothing isolates it: no image, no mounts, no device cgroup. With root and\n"
        "cgroups the same command runs a container."
    )


def _block(head: str, source: str, body: str, style: Style) -> str:
    lines = [f"{style.strong(head)}  {style.faint(source)}"]
    return "\n".join([*lines, *(f"  {line}".rstrip() for line in body.splitlines())])


def _logs(logs: Mapping[str, str]) -> str:
    """A line for each pod."""
    width = max(map(len, logs))
    return "\n".join(f"{pod:{width}}  {'  '.join(log.splitlines())}" for pod, log in logs.items())


def _slice_lines(document: Document, name: str) -> str:
    devices = document["spec"]["devices"]
    device = next(each for each in devices if each["name"] == name)
    attributes = device.get("attributes", {})
    facts = [(key, _value(attributes[key])) for key in ATTRIBUTES if key in attributes]
    capacity = device.get("capacity", {})
    facts += [(key, str(capacity[key]["value"])) for key in ("memory",) if key in capacity]
    more = len(attributes) + len(capacity) - len(facts)
    lines = [f"{document['metadata']['name']}: {name}, one of its {_count(devices, 'device')}"]
    lines += [f"  {key:23}{value}" for key, value in facts]
    return "\n".join([*lines, f"  and {more} more"] if more else lines)


def _value(attribute: Document) -> str:
    """An attribute is one of string, int, bool and version (KEP-4381, DeviceAttribute)."""
    return str(next(iter(attribute.values())))


def _spec_lines(spec: Document) -> str:
    """The edits of the device, and those that every device of the claim shares."""
    edits = [*(device["containerEdits"] for device in spec["devices"]), spec["containerEdits"]]
    names = ", ".join(f"{spec['kind']}={device['name']}" for device in spec["devices"])
    variables = _all(edits, "env")
    nodes = [node["path"] for node in _all(edits, "deviceNodes")]
    mounts = _all(edits, "mounts")
    targets = sorted({mount["containerPath"] for mount in mounts})
    shown = [path for path in (_first(targets, name) for name in _NAMED) if path] or targets[:1]
    rows = [
        ("device", names),
        ("env", variables[0] + _and_more(variables, 1)),
        ("deviceNodes", " ".join(nodes)),
        ("mounts", " ".join(shown) + _and_more(targets, len(shown))),
    ]
    return "\n".join(f"{key:13}{value}" for key, value in rows if value)


def _first(paths: Sequence[str], ending: str) -> str:
    return next((path for path in paths if path.endswith(ending)), "")


def _all(edits: Sequence[Document], key: str) -> list[Any]:
    return [entry for edit in edits for entry in edit.get(key) or ()]


def _and_more(entries: Sequence[object], shown: int) -> str:
    return f" and {len(entries) - shown} more" if len(entries) > shown else ""


def _count(entries: Sequence[object], noun: str) -> str:
    return f"{len(entries)} {noun}{'' if len(entries) == 1 else 's'}"
