"""The condition by which a node reports, written and read back; what is kept of a Node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.strict import ConfigError
from dra_driver.model.node_profiles import NodeReport, NodeView
from dra_driver.plan.node_conditions import LONGEST_MESSAGE
from dra_driver.plan.profiles.report import (
    read_node,
    read_report,
    report_condition,
)

REVISION = "inference-5d8fbz7k2x"
IN_FORCE = NodeReport("inference", REVISION)
NAMES = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", fullmatch=True)
GPUS = st.lists(st.integers(0, 99).map("gpu-{}".format), max_size=400)


def condition(report):
    written = report_condition(report)
    return {
        "type": "GPUsConfigured",
        "status": written.status,
        "reason": written.reason,
        "message": written.message,
    }


def node(*conditions, **metadata):
    metadata = {"name": "node-1", "uid": "u1", "resourceVersion": "7", **metadata}
    return {"metadata": metadata, "status": {"conditions": list(conditions)}}


@pytest.mark.parametrize(
    ("report", "status", "reason", "message"),
    [
        pytest.param(
            IN_FORCE,
            "True",
            "ProfileInForce",
            f"NodeProfile inference, revision {REVISION}: in force",
            id="in force",
        ),
        pytest.param(
            NodeReport("inference", REVISION, pending=2, pending_gpus=("gpu-0", "gpu-3")),
            "True",
            "GPUsPending",
            f"NodeProfile inference, revision {REVISION}: 2 GPUs change when no claim holds them: "
            "gpu-0, gpu-3",
            id="pending",
        ),
        pytest.param(
            NodeReport("inference", REVISION, pending=1, pending_gpus=("gpu-0",)),
            "True",
            "GPUsPending",
            f"NodeProfile inference, revision {REVISION}: 1 GPU changes when no claim holds it: "
            "gpu-0",
            id="one pending",
        ),
        pytest.param(
            NodeReport("inference", REVISION, pending=3),
            "True",
            "GPUsPending",
            f"NodeProfile inference, revision {REVISION}: 3 GPUs change when no claim holds them",
            id="pending without names",
        ),
        pytest.param(
            NodeReport("inference", REVISION, not_possible="gpu-2: there is no room"),
            "True",
            "ProfilePartlyInForce",
            f"NodeProfile inference, revision {REVISION}: in force; not possible: "
            "gpu-2: there is no room",
            id="not_possible",
        ),
        pytest.param(
            NodeReport(
                "inference",
                REVISION,
                pending=1,
                pending_gpus=("gpu-0",),
                not_possible="gpu-2: full",
            ),
            "True",
            "GPUsPending",
            f"NodeProfile inference, revision {REVISION}: 1 GPU changes when no claim holds it: "
            "gpu-0; not possible: gpu-2: full",
            id="pending and not_possible",
        ),
        pytest.param(
            NodeReport("inference", REVISION, refusal="no GPU is an H100"),
            "False",
            "ProfileRefused",
            f"NodeProfile inference, revision {REVISION}: refused: no GPU is an H100",
            id="refused",
        ),
        pytest.param(
            NodeReport("inference", refusal="it cannot be read"),
            "False",
            "ProfileRefused",
            "NodeProfile inference: refused: it cannot be read",
            id="refused before a revision was known",
        ),
        pytest.param(
            NodeReport("default", of_files=True),
            "True",
            "ProfileInForce",
            "profile default of the files: in force",
            id="files",
        ),
    ],
)
def test_a_report_becomes_a_condition_that_says_it(report, status, reason, message):
    written = report_condition(report)

    assert (status, reason, message) == (written.status, written.reason, written.message)
    assert report == read_report(condition(report))


@given(
    profile=NAMES,
    revision=NAMES,
    of_files=st.booleans(),
    gpus=GPUS,
    more=st.integers(0, 10_000),
    not_possible=st.text(max_size=2000),
    refusal=st.text(max_size=2000),
)
def test_what_is_read_back_is_what_was_reported(
    profile, revision, of_files, gpus, more, not_possible, refusal
):
    report = NodeReport(
        profile,
        "" if of_files else revision,
        of_files,
        pending=0 if refusal else len(gpus) + more,
        pending_gpus=() if refusal else tuple(gpus),
        not_possible="" if refusal else not_possible,
        refusal=refusal,
    )

    written = report_condition(report)
    read = read_report(condition(report))

    assert len(written.message) <= LONGEST_MESSAGE
    assert read is not None
    assert (profile, report.revision, of_files) == (read.profile, read.revision, read.of_files)
    assert report.pending == read.pending
    assert tuple(gpus)[: len(read.pending_gpus)] == read.pending_gpus or refusal
    assert report.not_possible.startswith(read.not_possible.removesuffix("…"))
    assert bool(report.not_possible) == bool(read.not_possible)
    assert refusal.startswith(read.refusal.removesuffix("…"))
    assert bool(refusal) == bool(read.refusal)


def test_of_many_pending_gpus_the_first_ones_are_named_and_all_are_counted():
    gpus = tuple(f"gpu-{number}" for number in range(400))
    report = NodeReport("inference", REVISION, pending=400, pending_gpus=gpus)

    message = report_condition(report).message

    assert len(message) <= LONGEST_MESSAGE
    assert "400 GPUs change" in message
    assert message.endswith(" more")


@pytest.mark.parametrize(
    "written",
    [
        None,
        "garbage",
        {"type": "GPUsConfigured"},
        {"type": "GPUsConfigured", "status": "True"},
        {"type": "GPUsConfigured", "status": 1, "message": "profile a of the files: in force"},
        {"type": "G", "status": "Unknown", "message": "profile a of the files: in force"},
        {"type": "G", "status": "True", "message": "NodeProfile a, revision b: on its way"},
    ],
)
def test_a_condition_that_says_no_report_is_none(written):
    assert read_report(written) is None


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_condition_is_too_odd_to_be_read(written):
    assert read_report(written) is None
    kept = read_node(node({"type": "GPUsConfigured", "message": written}))
    assert kept is not None
    assert kept.report is None


@pytest.mark.parametrize("outcome", ["", "refused: "])
def test_a_refusal_without_a_reason_is_one(outcome):
    message = f"NodeProfile inference, revision {REVISION}: {outcome}"
    written = {"type": "GPUsConfigured", "status": "False", "message": message}

    assert read_report(written) == NodeReport("inference", REVISION, refusal="no reason is given")


def test_a_node_is_kept_with_what_is_decided_by():
    document = node(
        {"type": "Ready", "status": "True"},
        condition(IN_FORCE),
        labels={"pool": "a"},
        annotations={"gpu.nvidia.com/profile-revision": REVISION, "other": "x"},
    )

    assert read_node(document) == NodeView(
        "node-1", "u1", "7", {"pool": "a"}, ready=True, given=REVISION, report=IN_FORCE
    )


def test_a_node_without_the_condition_is_not_kept():
    assert read_node(node({"type": "Ready", "status": "True"})) is None
    assert read_node({"metadata": {"name": "node-1"}, "status": {"conditions": None}}) is None


def test_a_node_that_nobody_gave_a_revision_and_that_is_not_ready():
    kept = read_node(node("garbage", {"type": 1}, condition(IN_FORCE)))

    assert kept == NodeView("node-1", "u1", "7", ready=False, report=IN_FORCE)


def test_what_is_no_node_is_refused_with_what_is_wrong():
    with pytest.raises(ConfigError, match="metadata: missing"):
        read_node({})
