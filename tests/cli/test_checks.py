"""What the doctor makes of what it sees: facts in, findings out."""

import doctest
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.cli import findings, terminal
from dra_driver.cli.doctor import cluster_checks, gpu_checks, host_checks
from dra_driver.cli.doctor.cluster_checks import NEEDED_PERMISSIONS, ApiPermission
from dra_driver.cli.doctor.host_checks import DirectoryState, LedgerSnapshot
from dra_driver.cli.findings import Level
from dra_driver.k8s.claims import ClaimUid
from dra_driver.kubeletplugin.serve.probes import PluginProcess, RegisteredPlugin
from dra_driver.kubeletplugin.slices.features import SliceFeatures
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, DriverLibrary
from dra_driver.model.gpus import DeviceName, Inventory, UnavailableGpu
from dra_driver.node.state.ledger_files import DamagedRecord
from tests.builders import gpu, gpu_uuid, record

DRIVER = "gpu.nvidia.com"
FILES = DriverFiles(
    version="580.95.05",
    root="/",
    machine="x86_64",
    lib_dir="/usr/lib64",
    libraries=(DriverLibrary("/usr/lib64/libcuda.so.580.95.05", "libcuda.so.1"),),
)


def book(*records, aside=()):
    return LedgerSnapshot(
        {record.claim.uid: record for record in records},
        {
            ClaimUid(uid): DamagedRecord(ClaimUid(uid), Path(f"/s/{uid}"), "cut", m)
            for uid, m in aside
        },
    )


def levels(findings):
    return [finding.level for finding in findings]


def test_the_examples_in_the_modules_hold():
    for module in (findings, cluster_checks, terminal):
        assert doctest.testmod(module).failed == 0


def test_only_what_is_to_be_mended_has_a_second_line():
    assert str(findings.ok("ledger", "2 claims")) == "[ok]   ledger: 2 claims"
    shown = str(findings.fail("ledger", "damaged", "remove it"))
    assert shown == "[FAIL] ledger: damaged\n       -> remove it"


class TestDriver:
    def test_a_whole_driver_is_named_with_its_version_and_root(self):
        finding = gpu_checks.driver_files_finding(FILES)

        assert finding.level is Level.OK
        assert "580.95.05 in /:" in finding.message

    def test_an_incomplete_one_fails_with_what_is_missing(self):
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


class TestGpus:
    def test_those_of_one_product_are_counted_together(self):
        (finding,) = gpu_checks.inventory_findings(Inventory((gpu(0), gpu(1))))

        assert finding.message == "2 NVIDIA H100 80GB HBM3: gpu-0, gpu-1"

    def test_an_unavailable_one_is_a_warning_beside_others_and_a_failure_alone(self):
        lost = UnavailableGpu("GPU 0000:1b:00.0", "it is lost")

        some = list(gpu_checks.inventory_findings(Inventory((gpu(0),), (lost,))))
        none = list(gpu_checks.inventory_findings(Inventory((), (lost,))))

        assert levels(some) == [Level.OK, Level.WARN]
        assert some[1].message == "GPU 0000:1b:00.0 is not offered: it is lost"
        assert levels(none) == [Level.FAIL]

    def test_a_node_without_gpus_is_no_place_for_the_driver(self):
        assert levels(gpu_checks.inventory_findings(Inventory())) == [Level.WARN]

    def test_device_files_are_listed_and_what_is_optional_does_not_fail(self):
        control = DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255)
        first = DeviceFile("/dev/nvidia0", "/dev/nvidia0", 195, 0)

        finding = gpu_checks.device_files_finding(DeviceFiles((control,), {0: first}))

        assert finding.level is Level.OK
        assert finding.message.startswith("nvidia0, nvidiactl in /dev (without nvidia-modeset")

    def test_device_files_that_cannot_be_made_fail(self):
        assert gpu_checks.device_files_finding(NodeError("missing")).level is Level.FAIL

    def test_a_hook_has_to_be_a_program(self):
        assert gpu_checks.cdi_hook_finding("/usr/bin/nvidia-cdi-hook", True).level is Level.OK
        assert gpu_checks.cdi_hook_finding("/usr/bin/nvidia-cdi-hook", False).level is Level.FAIL


class TestDisk:
    @pytest.mark.parametrize(
        ("is_there", "is_directory", "is_writable", "level"),
        [
            pytest.param(True, True, True, Level.OK, id="there"),
            pytest.param(False, True, True, Level.OK, id="can be made"),
            pytest.param(True, True, False, Level.FAIL, id="read-only"),
            pytest.param(True, False, False, Level.FAIL, id="a file"),
            pytest.param(False, True, False, Level.FAIL, id="cannot be made"),
        ],
    )
    def test_a_directory_has_to_be_one_that_we_may_write(
        self, is_there, is_directory, is_writable, level
    ):
        directory = DirectoryState(Path("/d"), is_there, is_directory, is_writable)

        assert (
            host_checks.directory_finding("state directory", directory, "--state-dir").level
            is level
        )

    def test_a_cdi_directory_that_no_runtime_made_is_worth_a_warning(self):
        missing = DirectoryState(Path("/var/run/cdi"), False, True, True)

        finding = host_checks.cdi_directory_finding(missing)

        assert finding.level is Level.WARN
        assert "enable_cdi" in finding.remedy

    def test_prepared_claims_and_files_that_agree_are_in_order(self):
        finding = host_checks.cdi_file_finding(
            {ClaimUid("uid-a")}, book(record("a"), record("b", completed=False))
        )

        assert (finding.level, finding.message) == (
            Level.OK,
            "1 claims are prepared, each has its file",
        )

    def test_a_prepared_claim_without_its_file_fails(self):
        finding = host_checks.cdi_file_finding(set(), book(record("a")))

        assert finding.level is Level.FAIL
        assert "default/a" in finding.message

    def test_a_file_of_no_claim_is_a_warning_unless_its_record_is_only_unreadable(self):
        assert host_checks.cdi_file_finding({ClaimUid("uid-x")}, book()).level is Level.WARN
        aside = book(aside=[("uid-x", None)])
        assert host_checks.cdi_file_finding({ClaimUid("uid-x")}, aside).level is Level.OK

    def test_a_conflict_about_our_devices_fails_and_a_strangers_broken_file_does_not(self):
        kind = "k8s.gpu.nvidia.com/claim"
        problems = [f"{kind}=a-gpu-0 is in conflict: 1 and 2", "/cdi/other.yaml is ignored: bad"]

        assert levels(host_checks.cdi_problem_findings(problems, kind)) == [Level.FAIL, Level.WARN]
        assert levels(host_checks.cdi_problem_findings([], kind)) == []

    def test_an_unreadable_record_says_what_it_keeps_from_others(self):
        known = book(aside=[("uid-x", {gpu_uuid(3): DeviceName("gpu-3")})])
        unknown = book(aside=[("uid-y", None)])

        (finding,) = host_checks.ledger_findings(Path("/s"), known)
        (any_,) = host_checks.ledger_findings(Path("/s"), unknown)

        assert finding.level is any_.level is Level.FAIL
        assert "/s/uid-x cannot be read: cut" in finding.message
        assert finding.remedy.startswith("gpu-3 takes no new claim")
        assert any_.remedy.startswith("every GPU takes no new claim")

    def test_a_claim_that_was_only_begun_is_told(self):
        findings = list(host_checks.ledger_findings(Path("/s"), book(record("a", completed=False))))

        assert levels(findings) == [Level.WARN, Level.OK]
        assert findings[0].message.startswith("1 claims are begun, or half given back: ")
        assert "an event of the pod" in findings[0].remedy


class TestPlugins:
    def test_one_process_that_answers_is_in_order(self):
        findings = host_checks.plugin_process_findings({PluginProcess(1, "0b7e-1"): ""})

        assert [(finding.level, finding.message) for finding in findings] == [
            (Level.OK, "pod 0b7e-1 answers over both its sockets")
        ]

    def test_none_is_a_warning_and_one_that_does_not_answer_fails(self):
        assert levels(host_checks.plugin_process_findings({})) == [Level.WARN]
        assert levels(host_checks.plugin_process_findings({PluginProcess(1, "42"): "refused"})) == [
            Level.FAIL
        ]

    def test_two_are_an_update_or_one_too_many(self):
        two = {PluginProcess(1, "a-1"): "", PluginProcess(2, "a-2"): ""}

        assert levels(host_checks.plugin_process_findings(two)) == [Level.OK, Level.OK, Level.WARN]

    def test_a_stranger_with_our_name_fails_and_others_are_only_named(self):
        theirs = RegisteredPlugin(Path("/r/gpu-reg.sock"), DRIVER, "/p/gpu/dra.sock")
        other = RegisteredPlugin(Path("/r/csi-reg.sock"), "csi.example", "/p/csi/csi.sock")

        rival = list(host_checks.other_plugin_findings([theirs, other], DRIVER))
        peace = list(host_checks.other_plugin_findings([other], DRIVER))

        assert levels(rival) == [Level.FAIL]
        assert "/r/gpu-reg.sock" in rival[0].message
        assert [(finding.level, finding.message.rpartition(": ")[2]) for finding in peace] == [
            (Level.OK, "csi.example")
        ]

    def test_a_socket_that_nobody_answers_at_is_a_warning(self):
        dead = RegisteredPlugin(Path("/r/x-reg.sock"), error="refused")

        assert levels(host_checks.other_plugin_findings([dead], DRIVER)) == [Level.WARN, Level.OK]

    def test_cdi_files_of_another_driver_are_a_warning(self):
        assert levels(host_checks.unmanaged_cdi_file_findings(["a.yaml"], Path("/cdi"))) == [
            Level.WARN
        ]
        assert levels(host_checks.unmanaged_cdi_file_findings([], Path("/cdi"))) == []


class TestCluster:
    def test_each_missing_right_is_named_with_the_rule_that_gives_it(self):
        missing = ApiPermission("resource.k8s.io", "resourceslices", "watch")

        (finding,) = cluster_checks.permission_findings({missing: "no rule"})

        assert finding.level is Level.FAIL
        assert "may not watch resourceslices.resource.k8s.io (no rule)" in finding.message
        assert 'verb "watch" on "resourceslices" in API group "resource.k8s.io"' in finding.remedy

    def test_all_rights_are_one_line(self):
        assert levels(cluster_checks.permission_findings({})) == [Level.OK]
        assert len(NEEDED_PERMISSIONS) == len(set(NEEDED_PERMISSIONS)) == 14

    def test_features_that_are_off_are_named_with_their_gate_and_are_no_fault(self):
        kept = SliceFeatures(
            device_taints=True,
            consumable_capacity=False,
            shared_counters=True,
            counters_apart=True,
            counters_beside=False,
            list_attributes=True,
        )

        finding, follows = cluster_checks.api_feature_findings(kept)

        assert finding.level is follows.level is Level.OK
        assert finding.message == (
            "kept: device taints, shared counters, list attributes; "
            "off, by feature gate: consumable capacity (DRAConsumableCapacity)"
        )
        assert follows.message.startswith("without consumable capacity GPUs are given out whole")

    def test_without_taints_nobody_monitors_shared_gpus(self):
        kept = SliceFeatures(
            device_taints=False,
            consumable_capacity=True,
            shared_counters=True,
            counters_apart=True,
            counters_beside=True,
            list_attributes=True,
        )

        _, follows = cluster_checks.api_feature_findings(kept)

        assert follows.message.startswith("without device taints there are no monitor devices")

    def test_counters_of_older_servers_are_not_enough_to_cut_gpus(self):
        kept = SliceFeatures(
            device_taints=True,
            consumable_capacity=True,
            shared_counters=True,
            counters_apart=False,
            counters_beside=True,
            list_attributes=True,
        )

        _, follows = cluster_checks.api_feature_findings(kept)

        assert follows.level is Level.OK
        assert "no MIG partition is created for claims" in follows.message
