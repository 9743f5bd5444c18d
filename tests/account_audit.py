"""What the driver's accounts asked of the API server while the tests for a cluster ran.

At the end of such a run its summary is printed. The run fails where a request was refused outside
of the tests that are marked ``refused``, and, where all end-to-end tests ran, where a right of the
chart was never used.
"""

import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hack.testbed.assets import DEFAULT_VERSION
from hack.testbed.audit import ApiRequest, read_requests
from hack.testbed.layout import default_layout
from hack.testbed.state import load_state
from tests.deploy.chart import RENDER_GOLDEN, documents, helm

END_TO_END = Path(__file__).parent / "e2e"
MARK = "refused"
# What the chart calls its accounts begins with the name of the release.
_ACCOUNT = re.compile(r"(?:.*-)?dra-driver-gpu-(.+)")
# A controller gives its lease back when it ends; `helm uninstall` has taken its rights by then.
_AT_THE_END = "controller: get leases.coordination.k8s.io"
_PROGRAMS = (
    "dra-driver"  # how the user agents of ours begin; tests that use an account have another
)

Rights = Mapping[str, Collection[str]]
"""By account, as the chart calls it without the release: "get pods", ..."""


@dataclass(frozen=True, slots=True)
class ProvokedRefusals:
    """While a test ran that is marked ``refused``."""

    resources: frozenset[str]
    begun: float  # seconds since the epoch
    ended: float

    def explain(self, request: ApiRequest) -> bool:
        is_in_time = self.begun <= request.received <= self.ended
        return is_in_time and request.resource in self.resources


@dataclass(slots=True)
class Findings:
    """Of one API server; those of several add up."""

    requests: Counter[str] = field(default_factory=Counter)  # of our programs: "mps-agent: get a"
    refused: list[str] = field(default_factory=list)  # also of tests that use such an account

    def for_controller(self) -> dict[str, Any]:
        """In types that workers can send."""
        return {"requests": dict(self.requests), "refused": self.refused}

    @classmethod
    def from_worker(cls, sent: Mapping[str, Any]) -> "Findings":
        return cls(Counter(sent["requests"]), list(sent["refused"]))

    def add(self, other: "Findings") -> None:
        self.requests.update(other.requests)
        self.refused += other.refused


def examine(requests: Iterable[ApiRequest], provoked: Collection[ProvokedRefusals]) -> Findings:
    """What counts of *requests*: those of our accounts."""
    findings = Findings()
    for request in requests:
        if not (name := _ACCOUNT.fullmatch(request.account)):
            continue
        what = f"{name[1]}: {request}"
        if not request.refusal:
            findings.requests[what] += request.user_agent.startswith(_PROGRAMS)
        elif what != _AT_THE_END and not any(each.explain(request) for each in provoked):
            findings.refused.append(f"{what}: {request.refusal}")
    return findings


def unused_rights(findings: Findings, rights: Rights) -> list[str]:
    return [
        f"{account}: {right}"
        for account, rights_of_account in sorted(rights.items())
        for right in sorted(rights_of_account)
        if not findings.requests[f"{account}: {right}"]
    ]


def rights_of_chart(rendered: Iterable[Mapping[str, Any]]) -> Rights:
    """By account, what the roles that are bound to it allow."""
    documents = [document for document in rendered if document]
    roles = {
        (document["kind"], document["metadata"]["name"]): document["rules"]
        for document in documents
        if document["kind"] in ("Role", "ClusterRole")
    }
    rights: dict[str, set[str]] = {}
    for document in documents:
        if document["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        role = document["roleRef"]
        for subject in document["subjects"]:
            name = _ACCOUNT.fullmatch(subject["name"])
            assert name, f"no account of the chart is called {subject['name']}"
            rights.setdefault(name[1], set()).update(_rights(roles[role["kind"], role["name"]]))
    return rights


def _rights(rules: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    # The API server asks for one with a colon beside another right (the status of
                    # claims): no request is called so.
                    if ":" not in verb:
                        yield f"{verb} {resource}{f'.{group}' if group else ''}"


class AccountAudit:
    """The plugin of pytest. Where there are several workers, each looks at its own API server."""

    def __init__(self, log: Path) -> None:
        """*log*: that of the API server."""
        self._log = log
        self._begun: float | None = None  # when the first test for a cluster did
        self._has_workers = False
        self._provoked: list[ProvokedRefusals] = []
        self._are_some_left_out = False
        self._is_whole = False  # all end-to-end tests ran, where all can
        self._findings = Findings()
        self._problems: list[str] = []

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._are_some_left_out |= any(item.get_closest_marker("cluster") for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        files = {item.path for item in session.items}
        are_all_there = files >= set(END_TO_END.glob("test_*.py"))
        self._is_whole = are_all_there and not self._are_some_left_out

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = time.time()
        if self._begun is None and item.get_closest_marker("cluster"):
            self._begun = begun
        try:
            return (yield)
        finally:
            resources = frozenset(name for mark in item.iter_markers(MARK) for name in mark.args)
            self._provoked.append(ProvokedRefusals(resources, begun, time.time()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        if output := getattr(node, "workeroutput", {}).get(MARK):
            self._has_workers = True
            self._is_whole |= output["is_whole"]
            self._problems += output["problems"]
            self._findings.add(Findings.from_worker(output))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._begun is not None:
            self._look(self._begun)
            self._is_whole = self._is_whole and _runs_every_test()
        if (worker_output := getattr(session.config, "workeroutput", None)) is not None:
            if self._begun is not None:
                more = {"is_whole": self._is_whole, "problems": self._problems}
                worker_output[MARK] = self._findings.for_controller() | more
            return
        if self._is_whole and not session.testsfailed:
            self._judge_rights()
        self._problems += [f"refused: {refused}" for refused in self._findings.refused]
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _look(self, begun: float) -> None:
        try:
            requests = read_requests(self._log, begun)
        except FileNotFoundError as error:
            self._problems.append(
                f"{error.filename} is not there: an earlier hack/cluster brought this cluster up; "
                "run hack/cluster down and hack/cluster up"
            )
        else:
            self._findings = examine(requests, self._provoked)

    def _judge_rights(self) -> None:
        rights = rights_of_chart(documents(helm(*RENDER_GOLDEN).stdout))
        self._problems += [
            f"never used: {right}; take it out of the chart, or have a test use it"
            for right in unused_rights(self._findings, rights)
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._begun is None and not self._has_workers:
            return
        which = "all end-to-end tests" if self._is_whole else "some end-to-end tests"
        terminalreporter.section(f"requests of the driver's accounts in {which}")
        for what, count in sorted((+self._findings.requests).items()):
            terminalreporter.write_line(f"{what}: {count}")
        for problem, count in sorted(Counter(self._problems).items()):
            terminalreporter.write_line(f"{count} x {problem}", red=True)


def _runs_every_test() -> bool:
    """Whether the cluster that is up does: one of an older version or without a node does not."""
    state = load_state(default_layout().state)
    return state is not None and state.node and state.version == DEFAULT_VERSION
