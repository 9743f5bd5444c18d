"""What the run of the tests for a cluster says of the requests of the driver's accounts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hack.testbed.audit import ApiRequest
from tests.account_audit import (
    Findings,
    ProvokedRefusals,
    examine,
    rights_of_chart,
    unused_rights,
)
from tests.deploy.chart import GOLDEN, REPOSITORY, documents

PLUGIN = "dra-driver-gpu-kubelet-plugin"


def request(
    text: str, account: str = PLUGIN, agent: str = "dra-driver", refusal: str = "", at: float = 10
) -> ApiRequest:
    verb, resource = text.split()
    return ApiRequest(account, verb, resource, agent, refusal, at)


def test_requests_count_for_the_account_that_the_chart_made_whatever_the_release() -> None:
    findings = examine(
        [
            request("get nodes"),
            request("get nodes", f"a-release-{PLUGIN}", "dra-driver-doctor"),
            request("list pods", "default"),
            request("list pods", agent="kubectl/v1.36.3"),
        ],
        (),
    )

    assert +findings.requests == {"kubelet-plugin: get nodes": 2}
    assert findings.refused == []


@pytest.mark.parametrize("agent", ["dra-driver", "kubectl/v1.36.3"])
def test_a_refused_request_is_a_finding_whoever_made_it(agent: str) -> None:
    findings = examine([request("list pods", agent=agent, refusal="no role")], ())

    assert +findings.requests == {}
    assert findings.refused == ["kubelet-plugin: list pods: no role"]


def test_a_controller_whose_rights_were_uninstalled_is_refused_its_lease_and_nothing_else() -> None:
    controller = "dra-driver-gpu-controller"
    refused = ("get leases.coordination.k8s.io", "update leases.coordination.k8s.io", "list nodes")

    findings = examine([request(each, controller, refusal="no role") for each in refused], ())

    assert findings.refused == [
        "controller: update leases.coordination.k8s.io: no role",
        "controller: list nodes: no role",
    ]


@pytest.mark.parametrize(
    ("at", "resource", "is_provoked"),
    [
        pytest.param(9, "nodes", False, id="before it"),
        pytest.param(10, "nodes", True, id="as it begins"),
        pytest.param(20, "nodes", True, id="as it ends"),
        pytest.param(21, "nodes", False, id="after it"),
        pytest.param(15, "nodes/status", False, id="of something else"),
    ],
)
def test_a_marked_test_explains_refusals_of_what_it_names_while_it_runs(
    at: float, resource: str, is_provoked: bool
) -> None:
    marked = ProvokedRefusals(frozenset({"nodes", "events"}), 10, 20)

    findings = examine([request(f"patch {resource}", refusal="no", at=at)], [marked])

    assert (not findings.refused) is is_provoked


def test_every_right_of_the_chart_has_to_be_used() -> None:
    rights = rights_of_chart(documents(GOLDEN.read_text()))
    asked = [
        request(right, f"dra-driver-gpu-{account}")
        for account, rights_of_account in rights.items()
        for right in rights_of_account
    ]
    assert {"kubelet-plugin", "uninstall"} <= rights.keys()
    assert unused_rights(examine(asked, ()), rights) == []

    asked = [each for each in asked if str(each) != "get pods"]
    refused = request("get pods", refusal="no")
    unused = unused_rights(examine([*asked, refused], ()), rights)
    assert unused == ["kubelet-plugin: get pods"]


def test_rights_are_those_of_the_roles_that_are_bound_to_an_account() -> None:
    def document(kind: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "metadata": {"name": name}, **fields}

    rule = {"apiGroups": ["apps", ""], "resources": ["daemonsets"], "verbs": ["get", "list"]}
    subjects = [{"kind": "ServiceAccount", "name": "r-dra-driver-gpu-hook"}]
    rights = rights_of_chart(
        [
            document("Role", "a", rules=[rule]),
            document("ClusterRole", "a", rules=[]),
            document("RoleBinding", "b", roleRef={"kind": "Role", "name": "a"}, subjects=subjects),
        ]
    )

    words = {"get daemonsets.apps", "list daemonsets.apps", "get daemonsets", "list daemonsets"}
    assert rights == {"hook": words}


def test_what_several_workers_found_adds_up() -> None:
    findings = Findings()
    for refusal in ("", "no"):
        found = examine([request("get nodes"), request("get pods", refusal=refusal)], ())
        findings.add(Findings.from_worker(found.for_controller()))

    assert findings.requests == {"kubelet-plugin: get nodes": 2, "kubelet-plugin: get pods": 1}
    assert findings.refused == ["kubelet-plugin: get pods: no"]


CONFTEST = """
from pathlib import Path
from tests.account_audit import AccountAudit

def pytest_configure(config):
    config.pluginmanager.register(AccountAudit(Path(__file__).with_name("audit.log")))
"""
REFUSED = """
import datetime, json, pathlib, pytest

@pytest.mark.cluster
{mark}
def test_it():
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    pathlib.Path(__file__).with_name("audit.log").write_text(json.dumps({{
        "auditID": "1", "verb": "list", "objectRef": {{"resource": "pods"}}, "requestURI": "/",
        "user": {{"username": "system:serviceaccount:gpus:dra-driver-gpu-kubelet-plugin"}},
        "responseStatus": {{"code": 403, "message": "no role"}}, "requestReceivedTimestamp": now,
    }}) + "\\n")
"""


@pytest.mark.parametrize(
    ("mark", "workers", "status", "line"),
    [
        ("", "0", 1, "1 x refused: kubelet-plugin: list pods: no role"),
        ("", "1", 1, "1 x refused: kubelet-plugin: list pods: no role"),
        ("@pytest.mark.refused('pods')", "1", 0, "requests of the driver's accounts in some"),
        (
            "@pytest.mark.refused('nodes')",
            "1",
            1,
            "1 x refused: kubelet-plugin: list pods: no role",
        ),
    ],
)
def test_a_run_fails_in_which_something_was_refused_outside_of_marked_tests(
    tmp_path: Path, mark: str, workers: str, status: int, line: str
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(REFUSED.format(mark=mark))
    options = ("-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-n", workers)

    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "1 passed" in run.stdout, run.stdout + run.stderr
    assert line in run.stdout
    assert run.returncode == status
