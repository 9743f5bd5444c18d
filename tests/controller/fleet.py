"""Nodes at a fake API server, whose plugins follow the controller as those of real nodes do."""

import contextlib
import threading
from pathlib import Path
from typing import Any

from api.names import CONFIG_VERSION, GPUS_CONFIGURED, PROFILE_REVISION_ANNOTATION
from dra_driver.base.errors import DriverError
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient, ApiTimeouts
from dra_driver.model.node_profiles import NodeReport
from dra_driver.plan.profiles.report import read_report, report_condition
from dra_driver.plan.profiles.revisions import (
    canonical_rules,
    profile_of_revision,
    revision_name,
)
from tests.fakes.api_server import ApiServer

NAMESPACE = "gpus"
PROFILE = "inference"
Document = dict[str, Any]


def revision(replicas: int, profile: str = PROFILE) -> str:
    """The name of the revision whose GPUs have so many replicas."""
    return revision_name(profile, canonical_rules({"gpus": [{"replicas": replicas}]}))


def profile_document(replicas: int = 1, name: str = PROFILE, **spec: Any) -> Document:
    return {
        "apiVersion": CONFIG_VERSION,
        "kind": "NodeProfile",
        "metadata": {"name": name},
        "spec": {"gpus": [{"replicas": replicas}], **spec},
    }


def at_once(nodes: int, **rollout: Any) -> Document:
    """A `spec.rollout` that reaches so many nodes at a time."""
    return {"maxUnavailable": nodes, **rollout}


def node_document(name: str, report: NodeReport | None, labels: Document) -> Document:
    """*report*: None, one that nobody can read."""
    reported = condition(report) if report else {"type": GPUS_CONFIGURED, "status": 7}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}, reported]},
    }


def condition(report: NodeReport) -> Document:
    fields = report_condition(report)
    return {
        "type": GPUS_CONFIGURED,
        "status": fields.status,
        "reason": fields.reason,
        "message": fields.message,
    }


OF_FILES = NodeReport("default", of_files=True)


class Fleet:
    """Plugins act in a thread of their own, from ``start`` to ``stop``."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self.server = server
        self.refusing: dict[str, str] = {}  # nodes that refuse what they are given, and why
        self.silent: set[str] = set()  # nodes whose plugin does nothing
        self.pending: dict[str, tuple[str, ...]] = {}  # GPUs in use, by node
        config = server.kubeconfig(directory / "plugins")
        self._api = ApiClient(load_kubeconfig(config), ApiTimeouts(retry=0.005), "plugins")
        self._followed: dict[str, str] = {}  # what each node did last, by its UID
        self._beats = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._act, name="plugins", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._api.close()

    def join(
        self, *names: str, report: NodeReport = OF_FILES, labels: Document | None = None
    ) -> None:
        for name in names:
            self.server.put(node_document(name, report, labels or {}))

    def heartbeat(self, node: str) -> None:
        """The kubelet writes to its Node, and nothing that concerns us."""
        self._beats += 1
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": str(self._beats)}
        patch = {"status": {"conditions": [ready]}}
        self._api.patch(f"/api/v1/nodes/{node}/status", patch, content_type=STRATEGIC_MERGE_PATCH)

    def annotate(self, node: str, given: str | None) -> None:
        """A person changes what the node was given."""
        annotations = {PROFILE_REVISION_ANNOTATION: given}
        self._api.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": annotations}})

    def create(self, document: Document) -> None:
        """Whatever faults the API server has."""
        self.server.put(document)

    def apply(self, document: Document) -> None:
        """As kubectl does: the status stays."""
        path = f"/apis/{CONFIG_VERSION}/nodeprofiles"
        name = document["metadata"]["name"]
        if any(each["metadata"]["name"] == name for each in self.server.objects("nodeprofiles")):
            self._api.patch(f"{path}/{name}", {"spec": document["spec"]})
        else:
            self._api.create(path, document)

    def status(self, profile: str = PROFILE) -> Document:
        for each in self.server.objects("nodeprofiles"):
            if each["metadata"]["name"] == profile:
                status: Document = each.get("status") or {}
                return status
        return {}

    def progress(self, profile: str = PROFILE) -> str:
        """The reason of the condition Progressing."""
        return self.reason("Progressing", profile)

    def reason(self, type_: str, profile: str = PROFILE) -> str:
        conditions = self.status(profile).get("conditions", ())
        return next((each["reason"] for each in conditions if each["type"] == type_), "")

    def given(self) -> dict[str, str | None]:
        """The annotation of each node."""
        return {node["metadata"]["name"]: _given(node) for node in self.server.objects("nodes")}

    def reported(self) -> dict[str, str]:
        """The revision in force on each node."""
        reports = {
            node["metadata"]["name"]: read_report(_condition(node))
            for node in self.server.objects("nodes")
        }
        return {name: report.revision for name, report in reports.items() if report}

    def with_revision(self, replicas: int) -> list[str]:
        """The nodes that were given the revision with so many replicas."""
        return [name for name, given in self.given().items() if given == revision(replicas)]

    def is_complete(self) -> bool:
        """Whether the status of the spec as it is now says so."""
        return self._is("Complete", PROFILE)

    def wait(self, progress: str, profile: str = PROFILE, seconds: float = 60.0) -> None:
        """Until the status of the spec as it is now says so."""
        assert self.server.wait(lambda: self._is(progress, profile), seconds), self.status(profile)

    def most_in_progress(self) -> int:
        """The most nodes at one time that were given what they did not report, all along."""
        in_progress: set[str] = set()
        most = 0
        for change in self.server.changes("nodes"):
            name = (change.after or change.before or {})["metadata"]["name"]
            after = change.after or {"metadata": {}}
            given = _given(after)
            if given and f"revision {given}:" not in _condition(after).get("message", ""):
                in_progress.add(name)
            else:
                in_progress.discard(name)
            most = max(most, len(in_progress))
        return most

    def writes(self) -> list[str]:
        """What the controller wrote, in order: method and path."""
        return [
            f"{request.method} {request.path}"
            for request in self.server.requests
            if request.method not in ("GET", "WATCH")
            and request.headers.get("User-Agent") != "plugins"
            and "/leases" not in request.path
            and "/events" not in request.path
        ]

    def _is(self, progress: str, profile: str) -> bool:
        for each in self.server.objects("nodeprofiles"):
            if each["metadata"]["name"] == profile:
                is_seen = self.status(profile).get("observedGeneration")
                is_seen = is_seen == each["metadata"]["generation"]
                return is_seen and self.progress(profile) == progress
        return False

    def _act(self) -> None:
        while not self._stopping.wait(0.02):
            for node in self.server.objects("nodes"):
                with contextlib.suppress(DriverError):
                    self._follow(node)

    def _follow(self, node: Document) -> None:
        name, uid, given = node["metadata"]["name"], node["metadata"]["uid"], _given(node)
        if given is None or name in self.silent or self._followed.get(uid) == given:
            return
        report = OF_FILES
        if given:
            report = NodeReport(profile_of_revision(given), given)
            if name in self.refusing:
                report = NodeReport(report.profile, given, refusal=self.refusing[name])
            elif gpus := self.pending.get(name):
                report = NodeReport(report.profile, given, pending=len(gpus), pending_gpus=gpus)
        patch = {"status": {"conditions": [condition(report)]}}
        self._api.patch(f"/api/v1/nodes/{name}/status", patch, content_type=STRATEGIC_MERGE_PATCH)
        self._followed[uid] = given


def _given(node: Document) -> str | None:
    annotations = node["metadata"].get("annotations") or {}
    given: str | None = annotations.get(PROFILE_REVISION_ANNOTATION)
    return given


def _condition(node: Document) -> Document:
    conditions = node.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == GPUS_CONFIGURED), {})
