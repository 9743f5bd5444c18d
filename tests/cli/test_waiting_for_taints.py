"""Claims and pods that wait because all devices that could serve them are tainted."""

from functools import partial

import pytest

from dra_driver.cli.doctor.scheduling.pending_claims import judge, of_verdict
from dra_driver.cli.doctor.scheduling.pending_pods import judge_pods, of_pods
from dra_driver.cli.findings import Level
from dra_driver.model.health import Effect, Fault, HealthRules, Problem
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from tests.builders import gpu, gpu_uuid
from tests.cli import scheduling
from tests.cli.scheduling import (
    DRIVER,
    GPU_CLASS,
    MIG_CLASS,
    OURS,
    A,
    claim,
    device_class,
    request,
    slices,
)
from tests.plan.mig.boards import dynamic, mig_gpu

CLASSES = (
    {**GPU_CLASS, "spec": {**GPU_CLASS["spec"], "extendedResourceName": "nvidia.com/gpu"}},
    device_class(f"monitor.{DRIVER}", f"{OURS} && {A}.type == 'gpu-monitor'"),
    device_class("any"),
    MIG_CLASS,
)
PATH = "spec.devices.requests[0].exactly"
published = partial(scheduling.published, classes=CLASSES)

FIRST = Fault(gpu_uuid(0), Problem.XID, "79")
SECOND = Fault(gpu_uuid(1), Problem.LOST)
BOTH = (FIRST, SECOND)
TAINTED = (
    "gpu-0 on n1 is tainted: gpu.nvidia.com/xid=79:NoSchedule (Xid 79: the GPU has fallen off the "
    "bus; reboot the node; if it happens again, have the GPU examined)"
)


def waits(*requests, faults=BOTH, others=()):
    """For which taints to go a claim for *requests* waits; empty: for none."""
    verdict = judge([claim(*requests)], published(slices(faults=faults), *others))
    assert not verdict.problems  # a taint goes
    return verdict.tainted[0][1] if verdict.tainted else ""


def test_a_claim_waits_where_each_device_that_could_serve_it_is_tainted():
    assert waits(request()) == (
        f"{PATH}: {TAINTED}; gpu-1 on n1 is tainted: gpu.nvidia.com/gpu-lost:NoSchedule (the GPU "
        "does not answer; reboot the node; if it happens again, have the GPU examined)"
    )


def test_partitions_with_the_same_taint_are_told_together():
    board = mig_gpu(on=True)
    sick = slices(board, rules=dynamic(), faults=[Fault(board.uuid, Problem.XID, "79")])

    ((_, why),) = judge([claim(request(f"mig.{DRIVER}"))], published(sick)).tainted

    assert why.count("Xid 79") == 1
    assert " more on n1 are tainted: gpu.nvidia.com/xid=79:NoSchedule (Xid 79" in why


def test_a_taint_that_is_none_of_ours_is_told_as_it_is():
    devices, counters = slices(gpu())
    devices["spec"]["devices"][0]["taints"] = [{"key": "example.com/a", "effect": "NoSchedule"}]

    ((_, why),) = judge([claim(request())], published((devices, counters))).tainted

    assert why == f"{PATH}: gpu-0 on n1 is tainted: example.com/a:NoSchedule"


@pytest.mark.parametrize(
    ("requested", "faults"),
    [
        pytest.param(request(), (), id="nothing is wrong"),
        pytest.param(request(), (FIRST,), id="another GPU is well"),
        pytest.param(
            request(),
            [Fault(gpu_uuid(place), Problem.THERMAL) for place in range(2)],
            id="what is wrong is no reason for a taint",
        ),
        pytest.param(request(tolerations=[{"operator": "Exists"}]), BOTH, id="it tolerates all"),
        pytest.param(
            request(
                tolerations=[{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]
            ),
            BOTH,
            id="it tolerates one",
        ),
        pytest.param([request(count=2), request()], (FIRST,), id="the second way has a GPU"),
        pytest.param([request(), request("any")], BOTH, id="or a device of another driver"),
        pytest.param(
            request(f"monitor.{DRIVER}", adminAccess=True, tolerations=[{"operator": "Exists"}]),
            BOTH,
            id="a monitor",
        ),
    ],
)
def test_what_may_be_placed_now_is_not_told(requested, faults):
    assert waits(requested, faults=faults) == ""


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "gpu.nvidia.com/xid", "value": "31"},
        {"key": "gpu.nvidia.com/xid", "operator": "Exists", "effect": "NoExecute"},
        {"key": "gpu.nvidia.com/released", "operator": "Exists"},
    ],
    ids=str,
)
def test_a_toleration_of_something_else_is_no_help(toleration):
    assert TAINTED in waits(request(tolerations=[toleration]))


def test_two_gpus_have_to_be_well_on_one_node():
    other = slices(node="n2", faults=(SECOND,))

    assert TAINTED in waits(request(count=2), faults=(FIRST,), others=(other,))
    assert waits(request(count=2), faults=(FIRST,), others=(slices(node="n2"),)) == ""


def test_all_gpus_of_a_node_are_given_only_where_all_are_well():
    every = request(allocationMode="All")

    assert TAINTED in waits(every, faults=(FIRST,))
    assert waits(every, faults=(FIRST,), others=(slices(node="n2"),)) == ""


def test_a_taint_that_evicts_keeps_claims_away_too():
    rules = Rules(health=HealthRules(effects=((Problem.XID, Effect.NO_EXECUTE),)))
    profile = Profile("strict", (ProfileEntry(GpuSelector(), rules, "spec.gpus[0]"),))
    node = published(slices(rules=profile, faults=(FIRST,)))

    ((_, why),) = judge([claim(request(count=2))], node).tainted

    assert "gpu-0 on n1 is tainted: gpu.nvidia.com/xid=79:NoExecute (" in why


def test_a_claim_that_can_never_be_served_does_not_wait_for_a_taint():
    verdict = judge([claim(request(count=3))], published(slices(faults=BOTH)))

    assert (len(verdict.problems), verdict.tainted) == (1, ())


def test_who_reads_it_is_told_where_to_read_on():
    (finding,) = of_verdict(judge([claim(request())], published(slices(faults=BOTH))))

    assert finding.level is Level.WARN
    assert finding.message.startswith("team-a/a waits: ")
    assert "'GPU health'" in finding.remedy


def test_pods_that_ask_by_the_name_of_a_resource_wait_too():
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    pods = [
        {
            "metadata": {"namespace": "team-a", "name": name},
            "spec": {"containers": [{"name": "main", "resources": resources}]},
        }
        for name in "ab"
    ]
    sick = published(slices(faults=BOTH))

    (finding,) = of_pods(judge_pods(pods, sick, ()), sick)
    (none,) = of_pods(judge_pods(pods, published(slices()), ()), published(slices()))

    assert finding.message.startswith(
        f"team-a/a, team-a/b waits: container main, nvidia.com/gpu: {TAINTED}"
    )
    assert none.level is Level.OK
