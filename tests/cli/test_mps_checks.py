"""What the doctor says of MPS: facts in, findings out."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.cli.doctor import mps_checks
from dra_driver.cli.findings import Level
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.mps import MpsLimits, MpsServerRestart, MpsStatus
from dra_driver.model.records import DeviceAllocation
from dra_driver.model.steps import ComputeMode, SetComputeMode
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.root import DriverRoot
from dra_driver.sim.parts import simulated_driver
from tests.cli.findings import ledger, levels
from tests.cli.mps import GIB, GPU, OTHER, SERVER, claim, server

DOWN = MpsAgentUnreachable(
    "the MPS agent of this node does not answer at /run/a.sock (Connection refused)"
)
TURNS = replace(claim("turns"), steps=())
POD = replace(
    claim("nvidia.com/gpu.shared", pods=["p"]),
    allocation=DeviceAllocation(ResourceName("nvidia.com/gpu.shared"), (DeviceId("GPU-1::0"),)),
)


def agent_findings(answer, *records, socket="/run/a.sock"):
    """What is said of an agent that gives *answer*, or why none."""
    sockets = []

    def ask(path):
        sockets.append(path)
        if isinstance(answer, Exception):
            raise answer
        return answer

    findings = list(mps_checks.check_mps_agent(socket, lambda: ledger(*records), ask))
    assert sockets == ([Path(socket)] if socket else []), "it is asked once"
    return findings


class TestAgent:
    def test_one_that_answers_is_followed_by_its_servers_other_daemons_and_claims(self):
        status = MpsStatus((server(ready=False),), unmanaged=("x",))

        first, *others = agent_findings(status)

        assert (first.level, first.message) == (Level.OK, "answers at /run/a.sock")
        assert [(finding.subject, finding.level) for finding in others] == [
            ("MPS servers", Level.FAIL),
            ("other MPS daemons", Level.WARN),
            ("MPS claims", Level.OK),
        ]

    @pytest.mark.parametrize(
        ("records", "level", "message"),
        [
            pytest.param([TURNS], Level.OK, "this node offers no MPS", id="nobody misses it"),
            pytest.param([claim("a")], Level.FAIL, "under it are: claim default/a", id="a claim"),
            pytest.param([POD], Level.FAIL, "under it are: pod default/p", id="a pod without one"),
        ],
    )
    def test_mps_that_is_switched_off_fails_where_a_claim_is_under_it(
        self, records, level, message
    ):
        (finding,) = agent_findings(DOWN, *records, socket="")

        assert (finding.level, "switched off" in finding.message) == (level, True)
        assert finding.message.endswith(message)

    @pytest.mark.parametrize(
        ("error", "records", "level"),
        [
            pytest.param(DOWN, [TURNS], Level.WARN, id="it does not run, and nobody misses it"),
            pytest.param(
                DOWN, [claim("a")], Level.FAIL, id="it does not run, and a claim needs it"
            ),
            pytest.param(TimedOut("waited 10 s"), [], Level.FAIL, id="it hangs"),
            pytest.param(NodeError("unknown version"), [], Level.FAIL, id="it says something else"),
        ],
    )
    def test_one_that_does_not_answer_is_told_once(self, error, records, level):
        (finding,) = agent_findings(error, *records)

        assert finding.level is level
        assert str(error) in finding.message
        assert ("default/a" in finding.message) is (records == [claim("a")])


class TestServers:
    def test_each_that_is_ready_is_a_line(self):
        (finding,) = mps_checks.mps_server_findings([server(claim("a"), clients=[7])], [])

        assert finding.level is Level.OK
        assert finding.message == f"{SERVER}: protocol 3, ready, 1 client"

    def test_one_that_is_not_ready_fails_with_its_reason(self):
        (finding,) = mps_checks.mps_server_findings([server(ready=False, reason="Fault")], [])

        assert (finding.level, "not ready: Fault" in finding.message) == (Level.FAIL, True)

    @pytest.mark.parametrize(
        ("incidents", "message"),
        [
            pytest.param([], "restarted 2 times", id="the reason is forgotten"),
            pytest.param(
                [
                    MpsServerRestart(1, SERVER, 1.0, "it was dead"),
                    MpsServerRestart(2, SERVER, 2.0, "it did not answer twice", clients=3),
                ],
                "restarted 2 times; the last time: it did not answer twice, and 3 clients were "
                "lost",
                id="the last reason counts",
            ),
        ],
    )
    def test_one_that_was_restarted_says_why_and_what_was_lost(self, incidents, message):
        (finding,) = mps_checks.mps_server_findings([server(claim("a"), restarts=2)], incidents)

        assert finding.level is Level.WARN
        assert finding.message.endswith(message)

    def test_none_is_in_order(self):
        assert levels(mps_checks.mps_server_findings([], [])) == [Level.OK]


def test_other_daemons_are_named_with_what_they_mean():
    (finding,) = mps_checks.unmanaged_daemon_findings(["nvidia-cuda-mps-control (process 4711)"])

    assert finding.level is Level.WARN
    assert "process 4711" in finding.message and "left alone" in finding.message
    assert "EXCLUSIVE_PROCESS" in finding.remedy and "/tmp/nvidia-mps" in finding.remedy
    assert levels(mps_checks.unmanaged_daemon_findings([])) == [Level.OK]


A, BEGUN = claim("a"), claim("a", completed=False)
A60, OLD_RULES = claim("a", percent=60), claim("a", default_limits=MpsLimits(50, 10 * GIB))
B, BEGUN_B, GONE = claim("b"), claim("b", completed=False), claim("gone")


@pytest.mark.parametrize(
    ("served", "before", "after", "level", "message"),
    [
        pytest.param([A, B], [A, BEGUN_B], None, Level.OK, "1 are prepared, and", id="they agree"),
        pytest.param([], [A], None, Level.FAIL, "not serve them: default/a", id="not served"),
        pytest.param([], [A], [], Level.OK, "0 are", id="given back meanwhile"),
        pytest.param([], [A], [BEGUN], Level.OK, "0 are", id="being prepared anew"),
        pytest.param([A], [], [A], Level.OK, "0 are", id="came meanwhile"),
        pytest.param([A], [A], [], Level.OK, "0 are", id="served, and given back meanwhile"),
        pytest.param([A60], [A], None, Level.FAIL, "other limits than", id="other limits"),
        pytest.param([OLD_RULES], [A], None, Level.OK, "1 are", id="the node's rules changed"),
        pytest.param([GONE], [], None, Level.WARN, "c_gone (claim UID uid-gone)", id="for nobody"),
    ],
)
def test_what_ledger_and_agent_do_not_agree_about_is_told(served, before, after, level, message):
    status = MpsStatus((server(*served),) if served else ())
    snapshots = (ledger(*before), ledger(*(before if after is None else after)))

    (finding,) = mps_checks.mps_namespace_findings(status, *snapshots)

    assert (finding.level, message in finding.message) == (level, True)


def test_what_is_served_for_a_claim_whose_record_cannot_be_read_is_no_orphan():
    status = MpsStatus((server(GONE),))

    findings = mps_checks.mps_namespace_findings(
        status, ledger(damaged={"uid-gone": None}), ledger()
    )

    assert levels(findings) == [Level.OK]


class TestPrograms:
    def test_a_driver_that_is_not_there_is_told_once(self, tmp_path):
        finding = mps_checks.mps_programs_finding(DriverRoot("/none", tmp_path))

        assert finding.level is Level.WARN
        assert finding.message.count("no complete NVIDIA driver") == 1

    def test_a_simulated_driver_has_them(self, tmp_path):
        driver = simulated_driver("h100x8", NodeConfig(), tmp_path / "sim")

        assert mps_checks.mps_programs_finding(driver.root).level is Level.OK


def compute_mode_findings(modes, *before, after=()):
    snapshots = iter([before, after])
    return list(mps_checks.check_compute_modes(partial(next, snapshots), [GPU, OTHER], modes.get))


class TestComputeModes:
    def test_gpus_in_the_default_mode_are_one_line(self):
        modes = {GPU.uuid: ComputeMode.DEFAULT, OTHER.uuid: ComputeMode.DEFAULT}

        (finding,) = compute_mode_findings(modes)

        assert (finding.level, finding.message) == (Level.OK, "DEFAULT: gpu-0, gpu-1")

    @pytest.mark.parametrize(
        ("mode", "level"),
        [
            (ComputeMode.EXCLUSIVE_PROCESS, Level.WARN),
            (ComputeMode.EXCLUSIVE_THREAD, Level.WARN),
            (ComputeMode.PROHIBITED, Level.FAIL),
        ],
    )
    def test_a_mode_that_no_claim_set_is_told_with_the_command_that_mends_it(self, mode, level):
        finding, _ = compute_mode_findings({GPU.uuid: mode}, claim("a"))

        assert finding.level is level
        assert f"gpu-0 is in {mode.name}, which no claim of this node set" in finding.message
        assert f"nvidia-smi -i {GPU.pci_bus_id} -c DEFAULT" in finding.remedy

    @pytest.mark.parametrize("is_given_back", [True, False])
    def test_one_that_a_claim_set_is_in_order_on_that_gpu_alone(self, is_given_back):
        """Also where the claim comes or goes while the GPUs are read."""
        mode = ComputeMode.EXCLUSIVE_PROCESS
        holder = replace(claim("a"), steps=(SetComputeMode(GPU.uuid, mode),))
        before, after = ((holder,), ()) if is_given_back else ((), (holder,))

        findings = compute_mode_findings({GPU.uuid: mode, OTHER.uuid: mode}, *before, after=after)

        assert [(finding.level, finding.message.partition(",")[0]) for finding in findings] == [
            (Level.OK, "gpu-0 is in EXCLUSIVE_PROCESS"),
            (Level.WARN, "gpu-1 is in EXCLUSIVE_PROCESS"),
        ]

    def test_a_gpu_that_does_not_tell_is_skipped(self):
        def read(uuid):
            if uuid == OTHER.uuid:
                raise NodeError("it is lost")

        findings = mps_checks.check_compute_modes(tuple, [GPU, OTHER], read)

        assert levels(findings) == [Level.SKIP, Level.SKIP]
