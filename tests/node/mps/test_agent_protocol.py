"""Requests and answers of the MPS agent as lines, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import (
    ClaimError,
    MpsAgentUnreachable,
    NodeError,
    SettingsError,
    TimedOut,
)
from dra_driver.model.mps import MpsNamespace, MpsServerRestart, MpsStatus
from dra_driver.node.mps.agent_protocol import ANSWERS, REQUESTS, AgentError, ServeRequest, decode

RESTARTS = st.lists(st.builds(MpsServerRestart, at=st.floats(allow_nan=False)), max_size=3)


@given(st.builds(MpsStatus, incidents=RESTARTS.map(tuple)))
def test_everything_an_agent_knows_survives_the_way(status):
    line = ANSWERS.encode(status)

    assert b"\n" not in line
    assert ANSWERS.decode(line) == status


@given(st.from_type(MpsNamespace))
def test_a_namespace_survives_the_way(namespace):
    request = ServeRequest(namespace)

    assert REQUESTS.decode(REQUESTS.encode(request)) == request


def test_a_line_that_is_none_is_an_error_that_says_what_may_help():
    with pytest.raises(NodeError) as caught:
        decode(
            REQUESTS,
            b'{"version":2,"release":"%s","StatusRequest":{}}' % RELEASE.encode(),
            "the request",
        )

    assert str(caught.value) == (
        "the request cannot be read: StatusRequest.version is 2, not 1; let the plugin and the MPS "
        "agent be of one release"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimedOut("late"), TimedOut),
        (ClaimError("no"), ClaimError),
        (NodeError("broken"), NodeError),
        (MpsAgentUnreachable("away"), NodeError),
        (SettingsError("odd"), NodeError),
    ],
)
def test_an_error_keeps_its_kind_at_the_other_end(error, kind):
    raised = AgentError.of(error).error

    assert type(raised) is kind
    assert str(raised) == str(error)


def test_an_error_of_an_unknown_kind_is_the_nodes():
    assert type(AgentError("KeyboardInterrupt", "x").error) is NodeError
