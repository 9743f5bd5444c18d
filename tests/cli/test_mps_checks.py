"""What the doctor says of MPS: facts in, findings out."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dra_driver.base.errors import MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.cli.doctor import gpu_checks, mps_checks
from dra_driver.cli.doctor.host_checks import LedgerSnapshot
from dra_driver.cli.doctor.mps_checks import CheckedMpsAgent, MpsAgentSnapshot
from dra_driver.cli.findings import Level
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.mps import MpsLimits, MpsServerRestart, MpsStatus
from dra_driver.model.steps import ComputeMode, SetComputeMode
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.ledger_files import DamagedRecord
from dra_driver.sim.parts import simulated_driver
from tests.builders import ref
from tests.cli.mps import GIB, GPU, OTHER, SERVER, claim, server

DOWN = MpsAgentUnreachable(
    "the MPS agent of this node does not answer at /run/a.sock (Connection refused)"
)


def levels(findings):
    return [finding.level for finding in findings]


def book(*records, aside=()):
    return LedgerSnapshot(
        {record.claim.uid: record for record in records},
        {ClaimUid(uid): DamagedRecord(ClaimUid(uid), Path("/s"), "cut", None) for uid in aside},
    )


def seen(status, *records, later=None, **fields):
    return MpsAgentSnapshot(
        status, book(*records, **fields), book(*(records if later is None else later))
    )


class TestAgent:
    def test_one_that_answers_is_in_order(self, tmp_path):
        scene = CheckedMpsAgent("/run/a.sock", lambda: tmp_path, lambda socket: MpsStatus())

        (finding,) = mps_checks.check_mps_agent(scene)

        assert (finding.level, finding.message) == (Level.OK, "answers at /run/a.sock")

    def test_a_node_without_mps_is_in_order_and_nothing_else_is_asked(self, tmp_path):
        def ask(socket):
            raise AssertionError(socket)

        scene = CheckedMpsAgent("", lambda: tmp_path, ask)

        (finding,) = mps_checks.check_mps_agent(scene)
        assert finding.level is Level.OK
        assert "switched off" in finding.message
        for check in (
            mps_checks.check_mps_servers,
            mps_checks.check_unmanaged_daemons,
            mps_checks.check_mps_claims,
        ):
            assert list(check(scene)) == []
        assert list(mps_checks.check_mps_programs(scene, DriverRoot(None, tmp_path))) == []

    def test_mps_that_was_switched_off_under_its_claims_fails(self):
        finding = mps_checks.no_mps_agent_finding([ref("a")])

        assert finding.level is Level.FAIL
        assert "1 claims are under it: default/a" in finding.message

    def test_one_that_is_missing_fails_where_it_is_missed(self):
        assert mps_checks.silent_mps_agent_finding(DOWN, []).level is Level.WARN
        missed = mps_checks.silent_mps_agent_finding(DOWN, [ref("a")])
        assert missed.level is Level.FAIL
        assert "Connection refused" in missed.message and "default/a" in missed.message

    @pytest.mark.parametrize("error", [TimedOut("waited 10 s"), NodeError("unknown version")])
    def test_one_that_is_there_and_does_not_tell_fails_always(self, error):
        assert mps_checks.silent_mps_agent_finding(error, []).level is Level.FAIL

    def test_claims_under_mps_are_found_in_the_ledger(self, tmp_path):
        ledger = Ledger(tmp_path, "boot")
        ledger.reload()
        ledger.write(claim("a"))
        ledger.write(replace(claim("turns"), steps=()))

        def ask(socket):
            raise DOWN

        scene = CheckedMpsAgent("/run/a.sock", lambda: tmp_path / "boot", ask)

        (finding,) = mps_checks.check_mps_agent(scene)
        assert scene.holders() == (ref("a"),)
        assert finding.level is Level.FAIL
        assert list(mps_checks.check_mps_servers(scene)) == [], "it was said why once"


class TestServers:
    def test_each_that_is_ready_is_a_line(self):
        (finding,) = mps_checks.mps_server_findings([server(claim("a"), clients=[7])], [])

        assert finding.level is Level.OK
        assert finding.message == f"{SERVER}: protocol 3, ready, 1 client"

    def test_one_that_is_not_ready_fails_with_its_reason(self):
        (finding,) = mps_checks.mps_server_findings([server(ready=False, reason="Fault")], [])

        assert (finding.level, "not ready: Fault" in finding.message) == (Level.FAIL, True)

    def test_one_that_was_restarted_says_why_the_last_time_and_what_was_lost(self):
        incidents = [
            MpsServerRestart(1, SERVER, 1.0, "it was dead"),
            MpsServerRestart(2, SERVER, 2.0, "it did not answer twice", clients=3),
        ]

        (finding,) = mps_checks.mps_server_findings([server(claim("a"), restarts=2)], incidents)

        assert finding.level is Level.WARN
        assert finding.message.endswith(
            "restarted 2 times; the last time: it did not answer twice, and 3 clients were lost"
        )

    def test_a_restart_of_which_the_reason_is_forgotten_is_told_all_the_same(self):
        (finding,) = mps_checks.mps_server_findings([server(claim("a"), restarts=1)], [])

        assert (finding.level, finding.message.endswith("restarted once")) == (Level.WARN, True)

    def test_none_is_in_order(self):
        assert levels(mps_checks.mps_server_findings([], [])) == [Level.OK]


def test_other_daemons_are_named_with_what_they_mean():
    (finding,) = mps_checks.unmanaged_daemon_findings(["nvidia-cuda-mps-control (process 4711)"])

    assert finding.level is Level.WARN
    assert "process 4711" in finding.message and "left alone" in finding.message
    assert "EXCLUSIVE_PROCESS" in finding.remedy and "/tmp/nvidia-mps" in finding.remedy
    assert levels(mps_checks.unmanaged_daemon_findings([])) == [Level.OK]


class TestClaims:
    def test_a_ledger_and_an_agent_that_agree_are_in_order(self):
        a, begun = claim("a"), claim("b", completed=False)
        status = MpsStatus((server(a, begun),))

        (finding,) = mps_checks.mps_namespace_findings(seen(status, a, begun))

        assert finding.level is Level.OK
        assert finding.message.startswith("1 are prepared")

    def test_a_prepared_claim_that_is_not_served_fails(self):
        (finding,) = mps_checks.mps_namespace_findings(seen(MpsStatus(), claim("a")))

        assert finding.level is Level.FAIL
        assert finding.message.endswith("does not serve them: default/a")

    @pytest.mark.parametrize(
        "later",
        [
            pytest.param((), id="it was given back meanwhile"),
            pytest.param((claim("a", completed=False),), id="it is being prepared anew"),
        ],
    )
    def test_one_that_came_or_went_meanwhile_is_not_judged(self, later):
        assert levels(
            mps_checks.mps_namespace_findings(seen(MpsStatus(), claim("a"), later=later))
        ) == [Level.OK]
        status = MpsStatus((server(claim("a")),))
        for both in (((), [claim("a")]), ([claim("a")], ())):
            findings = mps_checks.mps_namespace_findings(seen(status, *both[0], later=both[1]))
            assert levels(findings) == [Level.OK]

    def test_other_limits_than_were_granted_fail(self):
        status = MpsStatus((server(claim("a", percent=60)),))

        (finding,) = mps_checks.mps_namespace_findings(seen(status, claim("a")))

        assert finding.level is Level.FAIL
        assert finding.message.endswith("other limits than the ledger has: default/a")

    def test_rules_of_the_node_that_changed_since_are_no_other_limits(self):
        before = claim("a", default_limits=MpsLimits(50, 10 * GIB))

        (finding,) = mps_checks.mps_namespace_findings(
            seen(MpsStatus((server(before),)), claim("a"))
        )

        assert finding.level is Level.OK

    def test_what_is_served_for_nobody_is_a_warning_unless_its_record_is_only_unreadable(self):
        status = MpsStatus((server(claim("gone")),))

        (finding,) = mps_checks.mps_namespace_findings(seen(status))

        assert finding.level is Level.WARN
        assert "c_gone (claim UID uid-gone)" in finding.message
        assert levels(mps_checks.mps_namespace_findings(seen(status, aside=["uid-gone"]))) == [
            Level.OK
        ]


def test_the_agent_is_asked_once_however_many_checks_there_are(tmp_path):
    asked = []

    def ask(socket):
        asked.append(socket)
        return MpsStatus((server(ready=False),), unmanaged=("x",))

    scene = CheckedMpsAgent("/run/a.sock", lambda: tmp_path, ask)
    checks = (
        mps_checks.check_mps_agent,
        mps_checks.check_mps_servers,
        mps_checks.check_unmanaged_daemons,
        mps_checks.check_mps_claims,
    )

    severities = [finding.level for check in checks for finding in check(scene)]

    assert severities == [Level.OK, Level.FAIL, Level.WARN, Level.OK]
    assert asked == [Path("/run/a.sock")]


def test_a_driver_without_the_programs_of_mps_is_a_warning():
    whole = mps_checks.mps_programs_finding([])
    part = mps_checks.mps_programs_finding(
        ["the driver in / has no nvidia-cuda-mps-server: install it"]
    )

    assert (whole.level, part.level) == (Level.OK, Level.WARN)
    assert part.message.startswith("the driver in / has no nvidia-cuda-mps-server")


def test_a_driver_that_is_not_there_is_told_once(tmp_path):
    scene = CheckedMpsAgent("/run/a.sock", lambda: tmp_path, lambda socket: MpsStatus())

    (finding,) = mps_checks.check_mps_programs(scene, DriverRoot("/none", tmp_path))

    assert finding.level is Level.WARN
    assert finding.message.count("no complete NVIDIA driver") == 1


def test_a_simulated_driver_has_the_programs(tmp_path):
    scene = CheckedMpsAgent("/run/a.sock", lambda: tmp_path, lambda socket: MpsStatus())
    driver = simulated_driver("h100x8", NodeConfig(), tmp_path / "sim")
    assert levels(mps_checks.check_mps_programs(scene, driver.root)) == [Level.OK]


class TestComputeModes:
    def test_gpus_in_the_default_mode_are_one_line(self):
        modes = {GPU: ComputeMode.DEFAULT, OTHER: ComputeMode.DEFAULT}

        (finding,) = gpu_checks.compute_mode_findings(modes, [])

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
        (finding,) = gpu_checks.compute_mode_findings({GPU: mode}, [claim("a")])

        assert finding.level is level
        assert f"gpu-0 is in {mode.name}, which no claim of this node set" in finding.message
        assert f"nvidia-smi -i {GPU.pci_bus_id} -c DEFAULT" in finding.remedy

    def test_one_that_a_claim_set_is_in_order_on_that_gpu_alone(self):
        mode = ComputeMode.EXCLUSIVE_PROCESS
        holder = replace(claim("a"), steps=(SetComputeMode(GPU.uuid, mode),))

        findings = gpu_checks.compute_mode_findings({GPU: mode, OTHER: mode}, [holder])

        assert [(finding.level, finding.message.partition(",")[0]) for finding in findings] == [
            (Level.OK, "gpu-0 is in EXCLUSIVE_PROCESS"),
            (Level.WARN, "gpu-1 is in EXCLUSIVE_PROCESS"),
        ]

    def test_a_gpu_that_does_not_tell_is_skipped(self):
        def read(gpu):
            if gpu == OTHER.uuid:
                raise NodeError("it is lost")

        findings = list(gpu_checks.check_compute_modes(book, [GPU, OTHER], read))

        assert levels(findings) == [Level.SKIP, Level.SKIP]

    def test_a_claim_that_is_given_back_while_the_gpus_are_read_counts(self):
        mode = ComputeMode.EXCLUSIVE_PROCESS
        holder = replace(claim("a"), steps=(SetComputeMode(GPU.uuid, mode),))
        for both in ([book(holder), book()], [book(), book(holder)]):
            books = iter(both)
            findings = gpu_checks.check_compute_modes(partial(next, books), [GPU], lambda gpu: mode)
            assert levels(findings) == [Level.OK]
