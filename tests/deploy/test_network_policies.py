"""Network policies of the chart, in the hands of the real helm."""

import json
from typing import Any

import pytest

from tests.deploy.chart import CONTROLLER, MPS_AGENT, pod_spec, refusal, render

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use


def test_policies_let_the_http_ports_in_and_nothing_of_the_agent_out() -> None:
    rendered = render("--set", "httpPort=9400,mps.httpPort=9401,controller.httpPort=9402")
    for component, kind, port in (
        ("", "DaemonSet", 9400),
        (MPS_AGENT, "DaemonSet", 9401),
        (CONTROLLER, "Deployment", 9402),
    ):
        policy = rendered[f"{component} NetworkPolicy".lstrip()]
        labels = rendered[f"{component} {kind}".lstrip()]["spec"]["template"]["metadata"]["labels"]
        assert policy["metadata"]["namespace"] == "gpus"
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["spec"]["ingress"] == [{"ports": [{"port": port, "protocol": "TCP"}]}]
        [served] = pod_spec(rendered, component)["containers"][0]["ports"]
        assert served["containerPort"] == port
    for component in ("", f"{CONTROLLER} "):
        assert rendered[f"{component}NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    of_agent = rendered[f"{MPS_AGENT} NetworkPolicy"]["spec"]
    assert (of_agent["policyTypes"], of_agent["egress"]) == (["Ingress", "Egress"], [])


def test_policies_are_as_narrow_as_the_values_say() -> None:
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mon"}}}
    given: dict[str, list[Any]] = {"from": [monitoring], "to": ["10.96.0.1/32", "2001:db8::/64"]}
    rendered = render("--set-json", f"networkPolicy={json.dumps(given)}")
    for component in ("", MPS_AGENT, CONTROLLER):
        [rule] = rendered[f"{component} NetworkPolicy".lstrip()]["spec"]["ingress"]
        assert rule["from"] == [monitoring]
    for component in ("", f"{CONTROLLER} "):
        policy = rendered[f"{component}NetworkPolicy"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["egress"] == [{"to": [{"ipBlock": {"cidr": cidr}} for cidr in given["to"]]}]


@pytest.mark.parametrize(
    ("values", "rendered"),
    [
        pytest.param("networkPolicy.enabled=false", set(), id="none where they are unwanted"),
        pytest.param("hostNetwork=true", set(), id="none on the host's network, where none holds"),
        pytest.param(
            "mps.enabled=false,controller.enabled=false",
            {"NetworkPolicy"},
            id="none for an agent and a controller that are not",
        ),
    ],
)
def test_where_there_are_no_policies(values: str, rendered: set[str]) -> None:
    assert {kind for kind in render("--set", values) if "NetworkPolicy" in kind} == rendered


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param('to=["kubernetes.default"]', id="a name where an address belongs"),
        pytest.param('from=[{"namespaceSelectr":{}}]', id="a misspelt peer"),
        pytest.param("from=[{}]", id="an empty peer"),
        pytest.param(
            'from=[{"ipBlock":{"cidr":"10.0.0.0/8"},"podSelector":{}}]', id="a peer of two kinds"
        ),
    ],
)
def test_a_network_policy_that_the_api_server_would_refuse_is_refused(wrong: str) -> None:
    assert "networkPolicy" in refusal("--set-json", f"networkPolicy.{wrong}")
