"""The examples as data: their manifests, and what their first comment says has to come out.

The form of that comment is described in ``deploy/examples/README.md``. Whoever runs an example asks
``wrong`` about each check, with a function that reads the log of a container or a pod's events.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import yaml

EXAMPLES = Path(__file__).parents[2] / "deploy/examples"
# A cluster without a registry puts its own in their place.
IMAGES = ("ubuntu:24.04", "python:3.12-slim")

_NEEDS = re.compile(
    r"Needs (\d+) GPUs? on one node and Kubernetes 1\.(\d+)"
    r"(?:, with the profile ([\w-]+(?:\.yaml)?)(?: and the layouts ([\w-]+\.yaml))?"
    r"|, with the NodeProfile ([\w-]+\.yaml))?(?:: .+)?\."
)
_SIMULATED = re.compile(r"Simulated as ([\w-]+)\.")
_USES = re.compile(r"Uses (\d+)Gi of GPU memory: pod/(\S+) in (\S+)\.")
_EXPECT = re.compile(r"Expect pod/(\S+) in (\S+): (Succeeded|Running|Failed), (.+)")
_LOG = r"log(?: of (?P<container>[\w-]+))?"
_OTHER = r"(?:pod/(?P<pod>\S+) in (?P<namespace>\S+)|(?P<sibling>[\w-]+))"
_KIND = r"(?P<kind>GPU|partition)"
_COUNT = re.compile(_LOG + r" shows (?P<count>\d+) " + _KIND + "s?")
_TEXT = re.compile(_LOG + r' contains "(?P<text>[^"]+)"')
_SAME = re.compile(_LOG + r" shows the " + _KIND + "s of " + _OTHER)
_APART = re.compile(_LOG + r" shows other " + _KIND + "s than " + _OTHER)
_EVENTS = re.compile(r'events contain "(?P<text>[^"]+)"')
_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KINDS = {"GPU": "GPU", "partition": "MIG"}  # how their UUIDs begin


@dataclass(frozen=True, slots=True)
class Log:
    """What a container printed; without a container, the only one of the pod."""

    namespace: str
    pod: str
    container: str | None = None

    def __str__(self) -> str:
        where = f"pod/{self.pod} in {self.namespace}"
        return (
            f"the log of {self.container} of {where}" if self.container else f"the log of {where}"
        )


@dataclass(frozen=True, slots=True)
class Events:
    """What was told of a pod: one ``reason: message`` a line."""

    namespace: str
    pod: str

    def __str__(self) -> str:
        return f"the list of events of pod/{self.pod} in {self.namespace}"


@dataclass(frozen=True, slots=True)
class ShowsCount:
    log: Log
    count: int
    kind: str = "GPU"  # or "partition"


@dataclass(frozen=True, slots=True)
class Contains:
    log: Log | Events
    text: str


@dataclass(frozen=True, slots=True)
class Compares:
    """The log shows all GPUs, or partitions, of *second*, or none of them."""

    log: Log
    second: Log
    all_of_them: bool
    kind: str = "GPU"


Check = ShowsCount | Contains | Compares


@dataclass(frozen=True, slots=True)
class Expectation:
    """One pod: the phase it reaches, and what then holds of its logs."""

    namespace: str
    pod: str
    phase: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """How much of its GPU the program of a pod uses; a simulation has to be told."""

    namespace: str
    pod: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Example:
    """One folder of ``deploy/examples``."""

    name: str
    manifest: Path
    gpus: int  # free on one node
    minor: int  # of Kubernetes 1.x
    expectations: tuple[Expectation, ...]
    profile: Path | None = None  # that has to hold on the node
    uses: tuple[Uses, ...] = ()
    bundled: str = ""  # the profile that has to hold, where it comes with the driver
    layouts: Path | None = None  # of mig-parted, of which the profile names one
    node_profile: Path | None = None  # an object that is applied before, and holds on the node
    simulated: str = ""  # a node that will do; empty: any with so many GPUs

    def objects(self) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all(self.manifest.read_text()))

    def pods(self) -> list[dict[str, Any]]:
        """The pods that come of it; those of a StatefulSet as it makes them."""
        return [pod for document in self.objects() for pod in _pods(document)]


def _pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] == "Pod":
        yield document
    elif document["kind"] == "StatefulSet":
        name, space = document["metadata"]["name"], document["metadata"]["namespace"]
        template = document["spec"]["template"]
        for number in range(document["spec"]["replicas"]):
            metadata = {**template["metadata"], "name": f"{name}-{number}", "namespace": space}
            yield {"kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def examples() -> list[Example]:
    return [read(path) for path in sorted(EXAMPLES.iterdir()) if path.is_dir()]


def read(folder: Path) -> Example:
    """The example in *folder*. ValueError: a sentence of its comment has another form."""
    manifest = folder / f"{folder.name}.yaml"
    sentences = list(_comment(manifest.read_text()))
    needs = [_must(_NEEDS, s) for s in sentences if s.startswith("Needs ")]
    if len(needs) != 1:
        raise ValueError(f"{manifest}: one line must say what it Needs, not {len(needs)}")
    gpus, minor, profile, layouts, node_profile = needs[0].groups()
    is_file = bool(profile) and profile.endswith(".yaml")
    nodes = [_must(_SIMULATED, s)[1] for s in sentences if s.startswith("Simulated ")]
    return Example(
        name=folder.name,
        manifest=manifest,
        gpus=int(gpus),
        minor=int(minor),
        expectations=tuple(expectation(s) for s in sentences if s.startswith("Expect ")),
        profile=folder / profile if is_file else None,
        uses=tuple(_use(s) for s in sentences if s.startswith("Uses ")),
        bundled="" if is_file else profile or "",
        layouts=folder / layouts if layouts else None,
        node_profile=folder / node_profile if node_profile else None,
        simulated=nodes[0] if nodes else "",
    )


def _comment(manifest: str) -> Iterator[str]:
    """The lines of the comment at the top, without their marks."""
    for line in manifest.splitlines():
        if not line.startswith("#"):
            return
        yield line[1:].strip()


def _must(form: re.Pattern[str], sentence: str) -> re.Match[str]:
    match = form.fullmatch(sentence)
    if match is None:
        raise ValueError(f"{sentence!r} has another form than deploy/examples/README.md describes")
    return match


def _use(sentence: str) -> Uses:
    gib, pod, namespace = _must(_USES, sentence).groups()
    return Uses(namespace, pod, int(gib) << 30)


def expectation(sentence: str) -> Expectation:
    """What a sentence ``Expect pod/...`` says."""
    pod, namespace, phase, conditions = _must(_EXPECT, sentence).groups()
    parts = re.split(r", (?=log |events )", conditions)
    return Expectation(namespace, pod, phase, tuple(_check(part, namespace, pod) for part in parts))


def _check(part: str, namespace: str, pod: str) -> Check:
    if match := _EVENTS.fullmatch(part):
        return Contains(Events(namespace, pod), match["text"])
    if match := _COUNT.fullmatch(part):
        log = Log(namespace, pod, match["container"])
        return ShowsCount(log, int(match["count"]), match["kind"])
    if match := _TEXT.fullmatch(part):
        return Contains(Log(namespace, pod, match["container"]), match["text"])
    same = _SAME.fullmatch(part)
    match = same or _must(_APART, part)
    log, second = Log(namespace, pod, match["container"]), _second(match, namespace, pod)
    return Compares(log, second, same is not None, match["kind"])


def _second(match: re.Match[str], namespace: str, pod: str) -> Log:
    if match["sibling"]:
        return Log(namespace, pod, match["sibling"])
    return Log(match["namespace"], match["pod"])


def wrong(check: Check, read: Callable[[Log | Events], str]) -> str | None:
    """What contradicts *check* in what *read* finds, in words; None if nothing does."""
    text = read(check.log)
    fault: str | None
    match check:
        case ShowsCount(count=count, kind=kind):
            number = len(uuids(text, kind))
            fault = None if number == count else f"shows {number} {kind}s instead of {count}"
        case Contains(text=expected):
            fault = None if expected in text else f"lacks {expected!r}"
        case Compares(second=second, all_of_them=True, kind=kind):
            theirs = uuids(read(second), kind)
            missing = sorted(theirs - uuids(text, kind))
            fault = f"lacks {missing} of {second}" if missing else None
            fault = fault if theirs else f"cannot be compared: {second} shows no {kind}"
        case Compares(second=second, kind=kind):
            common = sorted(uuids(text, kind) & uuids(read(second), kind))
            fault = f"shows {common} as {second} does" if common else None
        case _:
            assert_never(check)
    return f"{check.log} {fault}; it is:\n{text}" if fault else None


def uuids(log: str, kind: str = "GPU") -> frozenset[str]:
    """The UUIDs of the GPUs, or of the partitions, in what ``nvidia-smi -L`` printed."""
    return frozenset(match[0] for match in _UUID.finditer(log) if match[1] == _KINDS[kind])
