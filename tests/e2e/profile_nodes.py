"""Nodes that nobody runs, with a stand-in for their plugins: it reports what a node is given."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from api.names import GPUS_CONFIGURED
from dra_driver.base.errors import ApiServerError, NotFound
from dra_driver.k8s.api import Watch
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient
from dra_driver.model.node_profiles import NodeReport, NodeView
from dra_driver.plan.profiles.report import read_node, report_condition
from dra_driver.plan.profiles.revisions import profile_of_revision
from tests.e2e.fake_nodes import TAINT, at_once

Document = dict[str, Any]

_NODES = "/api/v1/nodes"
_MARK = "dra.test/profile-node"
_OF_FILES = NodeReport("default", of_files=True)
_WATCH_SECONDS = 1800


class ProfileNodes:
    """Nodes as the API server has them, and the plugins on them. Any thread may look.

    *refusals*: by node, why its plugin refuses whatever it is given. *seconds*: until a plugin
    reports what it was given.
    """

    def __init__(self, api: ApiClient) -> None:
        self.api = api
        self.refusals: Mapping[str, str] = {}
        self.seconds = 0.0
        self.nodes: dict[str, NodeView] = {}
        self.most_in_progress = 0
        self.given = 0  # how often a node was given something
        self._counted = "-"  # how the names of nodes begin that are counted
        self._threads = ThreadPoolExecutor(8)
        self._watch: Watch | None = None
        self._is_ending = False

    def begin(self, pool: str) -> None:
        """Count anew, the nodes of *pool*."""
        self._counted = pool
        self.most_in_progress = self.given = 0

    def having(self, revision: str) -> set[str]:
        """The nodes that report it as in force."""
        return {
            name
            for name, node in self.nodes.items()
            if node.report and node.report.revision == revision and not node.report.refusal
        }

    def beat(self) -> None:
        """The kubelets say that they live; for 40 s they are believed."""
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": _now()}
        at_once(lambda name: self._patch(name, ready), list(self.nodes))

    def report(self, name: str, report: NodeReport) -> None:
        """The plugin of a node says so."""
        self._patch(name, condition_of(report))

    @contextmanager
    def following(self) -> Iterator[None]:
        """The plugins run."""
        thread = threading.Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_ending = True
            if self._watch:
                self._watch.close()
            thread.join(5)
            self._threads.shutdown()

    def _follow(self) -> None:
        """The API server ends a watch that falls behind: then all are listed again."""
        while not self._is_ending:
            with suppress(ApiServerError):
                listed = self.api.list(_NODES, {"labelSelector": _MARK})
                for document in listed["items"]:
                    self._see("MODIFIED", document)
                since = str(listed["metadata"]["resourceVersion"])
                query = {"labelSelector": _MARK, "resourceVersion": since}
                self._watch = self.api.watch(_NODES, query, _WATCH_SECONDS)
                for event in self._watch:
                    self._see(event["type"], event["object"])

    def _see(self, what: str, document: Document) -> None:
        node = read_node(document)
        if node is None:
            return
        before = self.nodes.get(node.name)
        if what == "DELETED":
            self.nodes.pop(node.name, None)
            return
        self.nodes[node.name] = node
        is_given = node.given is not None and (before is None or node.given != before.given)
        self._count(node, is_given)
        if is_given:
            self._threads.submit(self._report, node)

    def _count(self, node: NodeView, is_given: bool) -> None:
        if node.name.startswith(self._counted):
            self.given += is_given
            in_progress = sum(
                is_in_progress(each)
                for each in self.nodes.values()
                if each.name.startswith(self._counted)
            )
            self.most_in_progress = max(self.most_in_progress, in_progress)

    def _report(self, node: NodeView) -> None:
        time.sleep(self.seconds)
        report = _OF_FILES
        if node.given:
            refusal = self.refusals.get(node.name, "")
            report = NodeReport(profile_of_revision(node.given), node.given, refusal=refusal)
        self.report(node.name, report)

    def _patch(self, name: str, condition: Document) -> None:
        with suppress(NotFound):
            self.api.patch(
                f"{_NODES}/{name}/status",
                {"status": {"conditions": [condition]}},
                content_type=STRATEGIC_MERGE_PATCH,
            )


def is_in_progress(node: NodeView) -> bool:
    """Whether its plugin has not reported what the node was given last."""
    if node.given is None:
        return False
    return node.report is None or node.given != node.report.revision


@contextmanager
def profile_nodes(
    api: ApiClient, groups: Mapping[str, int], padding: str = ""
) -> Iterator[ProfileNodes]:
    """By the value of their label "pool", so many nodes each. They go in the end. *padding*: of an
    annotation, for nodes of the usual size."""
    names = {f"{pool}-{n:04}": pool for pool, number in groups.items() for n in range(number)}
    nodes = ProfileNodes(api)
    with nodes.following():
        try:
            at_once(lambda n: api.create(_NODES, node_document(n, names[n], padding)), names)
            yield nodes
        finally:
            at_once(lambda name: api.delete(f"{_NODES}/{name}"), names)


def node_document(name: str, pool: str, padding: str) -> Document:
    annotations = {"dra.test/padding": padding} if padding else {}
    labels = {_MARK: "", "pool": pool, "kubernetes.io/hostname": name}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]},
        "status": {"conditions": [ready | {"lastHeartbeatTime": _now()}, condition_of(_OF_FILES)]},
    }


def condition_of(report: NodeReport) -> Document:
    condition = report_condition(report)
    return {
        "type": GPUS_CONFIGURED,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
