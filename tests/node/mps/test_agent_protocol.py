"""Values of MPS as JSON, there and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import (
    ClaimError,
    MpsAgentUnreachable,
    NodeError,
    SettingsError,
    TimedOut,
)
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsNamespace,
    MpsNamespaceName,
    MpsPriority,
    MpsServerRestart,
    MpsStatus,
    ServedNamespace,
)
from dra_driver.node.mps import agent_protocol

SPACE = {"name": "c_1", "claim": "uid", "gpus": ["GPU-1"]}


def there_and_back(value):
    line = agent_protocol.dump({"value": agent_protocol.encode(value)})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return agent_protocol.decode(type(value), agent_protocol.parse(line, "it")["value"], "value")


INCIDENTS = st.lists(st.builds(MpsServerRestart, at=st.floats(allow_nan=False)), max_size=3)


@given(st.builds(MpsStatus, incidents=INCIDENTS.map(tuple)))
def test_everything_an_agent_knows_survives_the_way(status):
    assert there_and_back(status) == status


@given(st.from_type(MpsNamespace))
def test_a_namespace_survives_the_way(namespace):
    assert there_and_back(namespace) == namespace


def test_a_priority_comes_back_as_one():
    namespace = agent_protocol.decode(MpsNamespace, {**SPACE, "priority": 1}, "namespace")
    assert isinstance(namespace.priority, MpsPriority)
    assert namespace.priority is MpsPriority.BELOW_NORMAL


def test_what_is_missing_has_its_default_and_what_is_unknown_is_ignored():
    namespace = agent_protocol.decode(MpsNamespace, {**SPACE, "colour": "red"}, "namespace")
    assert namespace == MpsNamespace(MpsNamespaceName("c_1"), ClaimUid("uid"), (GpuUuid("GPU-1"),))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"percent": "30"}, 'namespace.percent is "30", not a whole number'),
        ({"percent": True}, "namespace.percent is true, not a whole number"),
        ({"percent": 1.5}, "namespace.percent is 1.5, not a whole number"),
        ({"percent": None}, "namespace.percent is null, not a whole number"),
        ({"gpus": "GPU-1"}, 'namespace.gpus is "GPU-1", not a list'),
        ({"gpus": ["GPU-1", 7]}, "namespace.gpus[1] is 7, not a text"),
        ({"memory_bytes": [None, "1Gi"]}, 'namespace.memory_bytes[1] is "1Gi", not a whole number'),
        ({"priority": 7}, "namespace.priority is 7, none of 0, 1"),
        ({"priority": [1]}, "namespace.priority is [1], none of 0, 1"),
        ({"most": 7}, "namespace.most is 7, not an object"),
        ({"most": {"percent": []}}, "namespace.most.percent is [], not a whole number"),
        ({"name": "x" * 99, "gpus": {}}, "namespace.gpus is {}, not a list"),
    ],
)
def test_another_type_is_an_error_that_names_the_field(change, said):
    with pytest.raises(NodeError) as caught:
        agent_protocol.decode(MpsNamespace, {**SPACE, **change}, "namespace")

    assert str(caught.value) == said


def test_what_has_no_default_has_to_be_there():
    with pytest.raises(NodeError, match=r"^namespace lacks claim, gpus$"):
        agent_protocol.decode(MpsNamespace, {"name": "c_1"}, "namespace")
    with pytest.raises(NodeError, match=r"^served.namespace lacks gpus$"):
        agent_protocol.decode(
            ServedNamespace,
            {"namespace": {"name": "c", "claim": "u"}, "protocol": 3, "pipe_directory": "/p"},
            "served",
        )


def test_a_whole_number_of_seconds_is_a_time():
    incident = {"number": 1, "server": "s", "at": 17, "reason": "", "clients": 2}
    assert agent_protocol.decode(MpsServerRestart, incident, "it").at == 17.0
    with pytest.raises(NodeError, match=r"it.at is \"now\", not a number"):
        agent_protocol.decode(MpsServerRestart, {**incident, "at": "now"}, "it")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 50000, "is not JSON"),
        (b"7", "is 7, not an object"),
        (b"{}", "has the version null; this release knows 1"),
        (b'{"version":2}', "has the version 2; this release knows 1: let the plugin"),
        (b'{"version":true}', "has the version true"),
    ],
)
def test_a_line_that_is_none_is_an_error_that_says_so(line, said):
    with pytest.raises(NodeError) as caught:
        agent_protocol.parse(line, "the answer")

    assert str(caught.value).startswith(f"the answer {said}")


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (TimedOut("late"), TimedOut),
        (ClaimError("no"), ClaimError),
        (NodeError("broken"), NodeError),
        (MpsAgentUnreachable("away"), NodeError),
        (SettingsError("odd"), NodeError),
    ],
)
def test_an_error_is_told_apart_at_the_other_end(problem, kind):
    told = agent_protocol.decode_error(
        json.loads(json.dumps(agent_protocol.encode_error(problem)))["error"]
    )

    assert type(told) is kind
    assert str(told) == str(problem)


@pytest.mark.parametrize("document", [None, {}, {"message": 7}, "broken"])
def test_an_error_without_words_is_one_all_the_same(document):
    assert "without a message" in str(agent_protocol.decode_error(document))


def test_an_error_of_an_unknown_kind_is_the_nodes():
    assert (
        type(agent_protocol.decode_error({"kind": "KeyboardInterrupt", "message": "x"}))
        is NodeError
    )
