"""What doctor says of the NodeProfile that selects the node."""

from typing import Any

import pytest

from api.names import GPUS_CONFIGURED, PROFILE_LABEL, PROFILE_REVISION_ANNOTATION
from dra_driver.cli.doctor.cluster_checks import CheckedCluster
from dra_driver.cli.doctor.node_profile_checks import check_node_profile
from dra_driver.cli.findings import Level
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.node_profiles import NodeReport
from dra_driver.plan.profiles.report import report_condition
from dra_driver.plan.profiles.revisions import canonical_rules, revision_name
from tests.fakes.api_server import ApiServer
from tests.fakes.connected import client, server

__all__ = ["client", "server"]
WHOLE: list[Any] = [{"fractions": "Never"}]
REVISION = revision_name("inference", canonical_rules({"gpus": WHOLE}))


def put_profile(
    server: ApiServer, name: str = "inference", reason: str = "", **status: Any
) -> None:
    document = {
        "kind": "NodeProfile",
        "metadata": {"name": name},
        "spec": {"gpus": WHOLE, "nodeSelector": {"pool": "inference"}},
    }
    server.put(document)
    progressing = {"type": "Progressing", "status": "False", "reason": reason}
    server.put(
        {**document, "status": {"observedGeneration": 1, "conditions": [progressing], **status}}
    )


def put_node(server: ApiServer, given: str, report: NodeReport, **labels: str) -> None:
    condition = report_condition(report)
    configured = {
        "type": GPUS_CONFIGURED,
        "status": condition.status,
        "message": condition.message,
    }
    server.put(
        {
            "kind": "Node",
            "metadata": {
                "name": "node-a",
                "labels": {"pool": "inference", **labels},
                "annotations": {PROFILE_REVISION_ANNOTATION: given},
            },
            "status": {"conditions": [configured]},
        }
    )


OF_FILES = NodeReport("default", of_files=True)


def findings(client: ApiClient) -> list[tuple[Level, str]]:
    cluster = CheckedCluster(client, ResourceApi(client), "gpu.nvidia.com", "node-a")
    return [(finding.level, finding.message) for finding in check_node_profile(cluster)]


def test_a_node_that_has_the_profile_is_in_order(server: ApiServer, client: ApiClient) -> None:
    put_profile(server)
    put_node(server, REVISION, NodeReport("inference", REVISION))

    assert findings(client) == [(Level.OK, f"inference: this node has revision {REVISION}")]


def test_a_node_that_refuses_the_profile_does_not_have_it(
    server: ApiServer, client: ApiClient
) -> None:
    put_profile(server)
    put_node(server, REVISION, NodeReport("inference", REVISION, refusal="no such field"))

    assert findings(client) == [
        (Level.WARN, f"inference: this node refuses revision {REVISION}: no such field")
    ]


MISSING = f"inference: this node does not have revision {REVISION} yet"


@pytest.mark.parametrize(
    ("given", "status", "level", "why"),
    [
        pytest.param("", {}, Level.OK, "it has its turn later", id="its turn comes"),
        pytest.param(
            REVISION,
            {},
            Level.WARN,
            "it was given it, and its plugin has not reported",
            id="the plugin is silent",
        ),
        pytest.param(
            "",
            {"observedGeneration": 0},
            Level.WARN,
            "the controller has not seen the change",
            id="no controller runs",
        ),
        pytest.param(
            "", {"reason": "Paused"}, Level.WARN, "the rollout has stopped: Paused", id="paused"
        ),
    ],
)
def test_it_says_why_the_node_does_not_have_the_profile(
    server: ApiServer,
    client: ApiClient,
    given: str,
    status: dict[str, Any],
    level: Level,
    why: str,
) -> None:
    put_profile(server, **status)
    put_node(server, given, OF_FILES)

    assert findings(client) == [(level, f"{MISSING}; {why}")]


def test_profiles_that_tie_are_both_named(server: ApiServer, client: ApiClient) -> None:
    put_profile(server)
    put_profile(server, "other")
    put_node(server, REVISION, NodeReport("inference", REVISION))

    tie, _ = findings(client)

    assert tie == (
        Level.WARN,
        "other has the priority of inference and selects this node, too; inference, the older one, "
        "holds",
    )


def test_a_label_that_names_a_file_goes_before(server: ApiServer, client: ApiClient) -> None:
    put_profile(server)
    put_node(server, "", OF_FILES, **{PROFILE_LABEL: "exclusive"})

    assert findings(client) == [(Level.OK, f"the label {PROFILE_LABEL} names a file")]


def test_a_label_that_names_a_node_profile_goes_before_selectors(
    server: ApiServer, client: ApiClient
) -> None:
    put_profile(server)
    put_profile(server, "other")
    other = revision_name("other", canonical_rules({"gpus": WHOLE}))
    put_node(server, "", NodeReport("other", other), **{PROFILE_LABEL: "other"})

    assert findings(client) == [(Level.OK, f"other: this node has revision {other}")]


def test_a_cluster_without_node_profiles_is_in_order(server: ApiServer, client: ApiClient) -> None:
    put_node(server, "", OF_FILES)
    assert findings(client) == [(Level.OK, "none selects this node")]

    server.fail(404, "GET", "nodeprofiles")
    assert findings(client) == [(Level.OK, "this cluster has none: profiles are files")]
