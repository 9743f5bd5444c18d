"""What the doctor makes of what it sees: facts in, findings out."""

import doctest
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.cli import findings, terminal
from dra_driver.cli.doctor import cluster_checks, gpu_checks, host_checks
from dra_driver.cli.doctor.host_checks import DirectoryState, LedgerSnapshot, inspect_directory
from dra_driver.cli.findings import Level
from dra_driver.k8s.claims import ClaimUid
from dra_driver.kubeletplugin.serve.probes import RegisteredPlugin
from dra_driver.kubeletplugin.serve.rolling_update import PluginProcess
from dra_driver.kubeletplugin.slices.features import SliceFeatures
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, DriverLibrary
from dra_driver.model.gpus import Inventory, UnavailableGpu
from tests.builders import gpu, inventory, prepared_device, record
from tests.cli.findings import ledger, levels

DRIVER = "gpu.nvidia.com"
FILES = DriverFiles(
    version="580.95.05",
    root="/",
    machine="x86_64",
    lib_dir="/usr/lib64",
    libraries=(DriverLibrary("/usr/lib64/libcuda.so.580.95.05", "libcuda.so.1"),),
)


def test_the_examples_in_the_modules_hold():
    for module in (findings, cluster_checks, terminal):
        assert doctest.testmod(module).failed == 0


def test_only_what_is_to_be_mended_has_a_second_line():
    assert str(findings.ok("ledger", "2 claims")) == "[ok]   ledger: 2 claims"


class TestGpus:
    def test_an_incomplete_driver_fails_with_what_is_missing(self):
        finding = gpu_checks.driver_files_finding(NodeError("no libcuda.so"))

        assert (finding.level, finding.message) == (Level.FAIL, "no libcuda.so")
        assert "--driver-root" in finding.remedy

    @pytest.mark.parametrize(
        ("loaded", "files", "level"),
        [
            pytest.param("580.95.05", FILES, Level.OK, id="the same"),
            pytest.param("570.124.06", FILES, Level.FAIL, id="an upgrade that was not finished"),
            pytest.param(None, FILES, Level.FAIL, id="no module"),
            pytest.param("580.95.05", NodeError("none"), Level.WARN, id="no libraries"),
            pytest.param(None, NodeError("none"), Level.SKIP, id="neither, which is told already"),
        ],
    )
    def test_the_loaded_module_has_to_be_that_of_the_libraries(self, loaded, files, level):
        assert gpu_checks.kernel_module_finding(loaded, files).level is level

    def test_an_unavailable_one_is_a_warning_beside_others_and_a_failure_alone(self):
        lost = UnavailableGpu("GPU 0000:1b:00.0", "it is lost")

        some = list(gpu_checks.inventory_findings(Inventory((gpu(0),), (lost,))))
        none = gpu_checks.inventory_findings(Inventory((), (lost,)))

        assert levels(some) == [Level.OK, Level.WARN]
        assert some[1].message == "GPU 0000:1b:00.0 is not offered: it is lost"
        assert levels(none) == [Level.FAIL]

    def test_a_lost_one_is_no_gpu_that_answers(self):
        inventory = Inventory((gpu(0), gpu(1)), lost=((gpu(1).uuid, "it fell off the bus"),))

        answers, lost = gpu_checks.inventory_findings(inventory)

        assert (answers.level, lost.level) == (Level.OK, Level.WARN)
        assert answers.message.endswith(": gpu-0")
        assert lost.message == "gpu-1 does not answer: it fell off the bus"

    def test_device_files_are_listed_and_what_is_optional_does_not_fail(self):
        control = DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255)
        files = {
            minor: DeviceFile(f"/dev/nvidia{minor}", f"/dev/nvidia{minor}", 195, minor)
            for minor in (0, 1)
        }

        finding = gpu_checks.device_files_finding(
            inventory(2).gpus, lambda minors: DeviceFiles((control,), {m: files[m] for m in minors})
        )

        assert finding.level is Level.OK
        assert finding.message.startswith(
            "nvidia0, nvidia1, nvidiactl in /dev (without nvidia-modeset"
        )

    def test_device_files_that_cannot_be_made_fail_and_without_a_gpu_none_are_looked_for(self):
        def find(minors):
            raise NodeError("missing")

        assert gpu_checks.device_files_finding([gpu(0)], find).level is Level.FAIL
        assert gpu_checks.device_files_finding([], find).level is Level.SKIP

    @pytest.mark.parametrize(
        ("path", "level"),
        [
            pytest.param("", Level.OK, id="none is used"),
            pytest.param("/usr/bin/hook", Level.OK, id="a program"),
            pytest.param("/etc/hook", Level.FAIL, id="no program"),
            pytest.param("/gone", Level.FAIL, id="not there"),
        ],
    )
    def test_a_hook_has_to_be_a_program_on_the_host(self, tmp_path, path, level):
        for file, mode in (("usr/bin/hook", 0o755), ("etc/hook", 0o644)):
            (tmp_path / file).parent.mkdir(parents=True)
            (tmp_path / file).touch(mode)

        assert gpu_checks.cdi_hook_finding(path, tmp_path).level is level


class TestDisk:
    @pytest.mark.parametrize(
        ("state", "level"),
        [
            pytest.param({}, Level.OK, id="there"),
            pytest.param({"is_there": False}, Level.OK, id="can be made"),
            pytest.param({"is_writable": False}, Level.FAIL, id="read-only"),
            pytest.param({"is_directory": False}, Level.FAIL, id="a file"),
            pytest.param(
                {"is_there": False, "is_writable": False}, Level.FAIL, id="not to be made"
            ),
        ],
    )
    def test_a_directory_has_to_be_one_that_we_may_write(self, state, level):
        finding = host_checks.directory_finding("state", DirectoryState(Path("/d"), **state), "--d")

        assert finding.level is level

    def test_a_directory_that_was_removed_while_it_is_mounted_is_a_failure(self, tmp_path):
        mounted = os.open(tmp_path, os.O_RDONLY)  # its path stays, as that of a mount does
        try:
            path = Path(f"/proc/self/fd/{mounted}/.")
            assert host_checks.cdi_directory_finding(inspect_directory(path)).level is Level.OK
            tmp_path.rmdir()
            finding = host_checks.cdi_directory_finding(inspect_directory(path))
        finally:
            os.close(mounted)

        assert finding.level is Level.FAIL
        assert finding.message == f"{path} was removed from the node while this pod had it"

    @pytest.mark.parametrize(
        ("files", "known", "level", "message"),
        [
            pytest.param(
                ["uid-a"],
                ledger(record("a"), record("b", completed=False)),
                Level.OK,
                "1 claims are prepared, each has its file",
                id="they agree",
            ),
            pytest.param([], ledger(record("a")), Level.FAIL, "none: default/a", id="no file"),
            pytest.param(["uid-x"], ledger(), Level.WARN, "of: uid-x", id="no claim"),
            pytest.param(
                ["uid-x"], ledger(damaged={"uid-x": None}), Level.OK, "", id="unreadable record"
            ),
        ],
    )
    def test_every_prepared_claim_has_its_file_and_every_file_its_claim(
        self, files, known, level, message
    ):
        finding = host_checks.cdi_file_finding(set(map(ClaimUid, files)), known)

        assert finding.level is level
        assert finding.message.endswith(message)

    def test_a_conflict_about_our_devices_fails_and_a_strangers_broken_file_does_not(self):
        vendor = "k8s.gpu.nvidia.com"
        ours = [
            f"{vendor}/{name} is in conflict: 1 and 2" for name in ("claim=a-gpu-0", "driver=files")
        ]
        problems = [*ours, "/cdi/other.yaml is ignored: bad"]

        findings = levels(host_checks.cdi_problem_findings(problems, vendor))
        assert findings == [Level.FAIL, Level.FAIL, Level.WARN]
        assert levels(host_checks.cdi_problem_findings([], vendor)) == []

    @pytest.mark.parametrize("there", [True, False])
    def test_the_drivers_spec_is_missed_where_a_prepared_claim_relies_on_it(self, there):
        own, common = "k8s.gpu.nvidia.com/claim=uid-a-gpu-0", "k8s.gpu.nvidia.com/driver=files"
        prepared = replace(record("a"), prepared=(prepared_device("gpu-0", "gpu", own, common),))
        devices = {own, common} if there else {own}

        findings = list(host_checks.driver_spec_findings(devices, ledger(prepared)))

        assert levels(findings) == ([] if there else [Level.FAIL])
        assert all(finding.message.startswith(common) for finding in findings)
        assert levels(host_checks.driver_spec_findings(set(), ledger(record("b")))) == []

    @pytest.mark.parametrize(
        ("gpus", "held"), [(["gpu-3"], "gpu-3"), (None, "every GPU")], ids=["known", "unknown"]
    )
    def test_an_unreadable_record_says_what_it_keeps_from_others(self, gpus, held):
        known = ledger(damaged={"uid-x": gpus})

        (finding,) = host_checks.ledger_findings(Path("/s"), known)

        assert finding.level is Level.FAIL
        assert finding.message == "/s/uid-x cannot be read: it is cut short"
        assert finding.remedy.startswith(f"{held} takes no new claim")

    def test_a_record_of_another_release_says_which_one_to_install(self):
        damaged = ledger(damaged={"uid-x": ["gpu-0"]}).unreadable
        theirs = {uid: replace(each, release="0.9.0") for uid, each in damaged.items()}

        (finding,) = host_checks.ledger_findings(Path("/s"), LedgerSnapshot({}, theirs))

        assert finding.remedy == (
            "gpu-0 takes no new claim until release 0.9.0 is installed again, or the node reboots"
        )

    def test_a_claim_that_was_only_begun_is_told(self):
        begun, known = host_checks.ledger_findings(Path("/s"), ledger(record("a", completed=False)))

        assert (begun.level, known.level) == (Level.WARN, Level.OK)
        assert begun.message.startswith("1 claims are begun, or half given back: ")
        assert "an event of the pod" in begun.remedy


class TestPlugins:
    @pytest.mark.parametrize(
        ("answers", "expected"),
        [
            pytest.param({}, [Level.WARN], id="none runs"),
            pytest.param({PluginProcess(1, "42"): "refused"}, [Level.FAIL], id="no answer"),
            pytest.param(
                {PluginProcess(1, "a-1"): "", PluginProcess(2, "a-2"): ""},
                [Level.OK, Level.OK, Level.WARN],
                id="an update, or one too many",
            ),
        ],
    )
    def test_one_process_should_run_and_answer(self, answers, expected):
        assert levels(host_checks.plugin_process_findings(answers)) == expected

    def test_a_stranger_with_our_name_fails_and_others_are_only_named(self):
        theirs = RegisteredPlugin(Path("/r/gpu-reg.sock"), DRIVER, "/p/gpu/dra.sock")
        other = RegisteredPlugin(Path("/r/csi-reg.sock"), "csi.example", "/p/csi/csi.sock")

        (rival,) = host_checks.other_plugin_findings([theirs, other], DRIVER)
        (peace,) = host_checks.other_plugin_findings([other], DRIVER)

        assert (rival.level, "/r/gpu-reg.sock" in rival.message) == (Level.FAIL, True)
        assert (peace.level, peace.message.rpartition(": ")[2]) == (Level.OK, "csi.example")

    def test_a_socket_that_nobody_answers_at_is_a_warning(self):
        dead = RegisteredPlugin(Path("/r/x-reg.sock"), error="refused")

        assert levels(host_checks.other_plugin_findings([dead], DRIVER)) == [Level.WARN, Level.OK]


ALL_KEPT = SliceFeatures(
    device_taints=True,
    consumable_capacity=True,
    shared_counters=True,
    counters_apart=True,
    counters_beside=True,
    list_attributes=True,
)


class TestFeatures:
    @pytest.mark.parametrize(
        ("feature", "consequence"),
        [
            ("consumable_capacity", "without consumable capacity GPUs are given out whole"),
            ("device_taints", "without device taints there are no monitor devices"),
            ("counters_apart", "no MIG partition is created for claims"),
        ],
    )
    def test_what_follows_from_one_that_is_off_is_told_and_is_no_fault(self, feature, consequence):
        kept = replace(ALL_KEPT, **{feature: False})

        finding, follows = cluster_checks.api_feature_findings(kept)

        assert finding.level is follows.level is Level.OK
        assert consequence in follows.message

    def test_those_that_are_off_are_named_with_their_gate(self):
        kept = replace(ALL_KEPT, consumable_capacity=False)

        assert next(cluster_checks.api_feature_findings(kept)).message == (
            "kept: device taints, shared counters, list attributes; "
            "off, by feature gate: consumable capacity (DRAConsumableCapacity)"
        )
