"""What a node can enforce of what it grants: facts in, findings out."""

from pathlib import Path

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.cli.doctor import sharing_checks as checks
from dra_driver.cli.findings import Level
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.memory.support import MemoryAccounting, MemoryLimitSupport
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.profiles.rules import SelectedProfile, select_profile
from tests.builders import gpu
from tests.fakes.mig import mig_gpu

CHOSEN = SelectedProfile("mine", "--profile")


def test_a_gpu_in_mig_mode_with_nothing_cut_of_it_is_said_and_what_to_do():
    gpus = Inventory((mig_gpu(on=True, switches=False),))
    offer = build_offer(gpus, Profile("default"), ApiFeatures(), {})

    (finding,) = checks.offer_findings(offer, gpus)

    assert finding.level is Level.FAIL
    assert "is not offered: MIG mode is on" in finding.message
    assert list(checks.offer_findings(offered(include=False), Inventory((gpu(0),)))) == []


def offered(features=None, **rules):
    gpus = Inventory((gpu(0), gpu(1)))
    profile = Profile("mine", (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),))
    return build_offer(gpus, profile, features or ApiFeatures(), {})


@pytest.mark.parametrize(
    ("flag", "labels", "expected"),
    [
        pytest.param("", {}, "default", id="nothing"),
        pytest.param("a", {"gpu.nvidia.com/profile": "b"}, "a", id="the flag counts"),
        pytest.param(
            "",
            {"gpu.nvidia.com/profile": "b", "nvidia.com/device-plugin.config": "c"},
            "b",
            id="our label before the older one",
        ),
        pytest.param("", {"nvidia.com/device-plugin.config": "c"}, "c", id="the older label"),
        pytest.param("", {"gpu.nvidia.com/profile": ""}, "default", id="an empty label"),
    ],
)
def test_the_flag_chooses_before_the_labels_and_they_before_the_default(flag, labels, expected):
    assert select_profile(flag, "n1", labels).name == expected


def test_an_unusable_profile_fails_with_who_chose_it():
    finding = checks.unusable_profile_finding(
        CHOSEN, SettingsError("profile 'mine': a.yaml: spec.x: unknown")
    )

    assert finding.level is Level.FAIL
    assert finding.message == "--profile: profile 'mine': a.yaml: spec.x: unknown"


def test_each_note_on_a_profile_is_a_warning():
    assert [finding.level for finding in checks.profile_warning_findings(["a", "b"])] == [
        Level.WARN
    ] * 2


@pytest.mark.parametrize(
    ("features", "rules", "expected"),
    [
        pytest.param(ApiFeatures(), {}, ["sliceable: gpu-0, gpu-1"], id="parts"),
        pytest.param(ApiFeatures(), {"fractions": False}, ["exclusive: gpu-0, gpu-1"], id="whole"),
        pytest.param(ApiFeatures(), {"replicas": 2}, ["2 replicas: gpu-0, gpu-1"], id="replicas"),
        pytest.param(
            ApiFeatures(capacity=False), {"replicas": 2}, ["2 replicas: gpu-0, gpu-1"], id="devices"
        ),
        pytest.param(ApiFeatures(), {"include": False}, [], id="none"),
    ],
)
def test_gpus_are_told_by_shape_each_once(features, rules, expected):
    findings = list(checks.offer_findings(offered(features, **rules)))

    assert [finding.message for finding in findings] == expected
    assert all(finding.level is Level.OK for finding in findings)


def test_what_cannot_be_offered_as_the_profile_says_is_a_warning():
    findings = list(checks.offer_findings(offered(replicas=2, memory_step=60 << 30)))

    assert [finding.level for finding in findings] == [Level.OK, Level.WARN, Level.WARN]
    assert "gpu-0 is not offered as the profile says, but exclusive: " in findings[1].message


@pytest.mark.parametrize(
    ("status", "strict", "level"),
    [
        pytest.param(
            MemoryLimitSupport(MemoryAccounting.DMEM), True, Level.OK, id="the driver limits"
        ),
        pytest.param(
            MemoryLimitSupport(None, "too old"), False, Level.OK, id="it does not, as most"
        ),
        pytest.param(
            MemoryLimitSupport(None, "too old"), True, Level.FAIL, id="and the profile insists"
        ),
        pytest.param(
            MemoryLimitSupport(None, "refused", fault=True), False, Level.WARN, id="it refuses"
        ),
    ],
)
def test_limits_that_the_driver_lacks_fail_only_where_a_profile_insists(status, strict, level):
    finding = checks.memory_limit_finding(status, strict)

    assert finding.level is level
    assert (status.reason or "dmem") in finding.message


def test_a_profile_insists_where_a_gpu_in_parts_is_strict():
    assert checks.requires_driver_limits(offered(strict=True))
    assert not checks.requires_driver_limits(offered(strict=True, fractions=False))
    assert not checks.requires_driver_limits(offered())


def test_gpus_that_nobody_watches_are_named():
    assert list(checks.unenforced_gpu_findings(offered())) == []
    (finding,) = checks.unenforced_gpu_findings(offered(limited=False))
    assert finding.message.endswith("gpu-0, gpu-1")


@pytest.mark.parametrize(
    ("is_there", "unified", "level", "word"),
    [
        pytest.param(True, True, Level.OK, "v2", id="v2"),
        pytest.param(True, False, Level.OK, "v1", id="v1"),
        pytest.param(False, False, Level.WARN, "missing", id="not mounted"),
    ],
)
def test_the_cgroup_hierarchy_is_told(is_there, unified, level, word):
    finding = checks.cgroups_finding(Path("/sys/fs/cgroup"), is_there, unified, Path("/c/kubepods"))

    assert finding.level is level
    assert word in finding.message


def test_a_cgroup_tree_is_looked_at_where_the_host_has_it(tmp_path):
    root = tmp_path / "sys/fs/cgroup"
    (root / "kubepods.slice").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory dmem\n")

    (finding,) = checks.check_cgroups(tmp_path)

    assert finding.message == f"v2; pods are below {root / 'kubepods.slice'}"


def test_a_runtime_that_keeps_its_state_elsewhere_is_a_warning_until_it_is_said_where(tmp_path):
    (tmp_path / "own/io.containerd.runtime.v2.task/k8s.io").mkdir(parents=True)

    (lost,) = checks.check_container_runtime(tmp_path, "")
    (finding,) = checks.check_container_runtime(tmp_path, "/own")

    assert lost.level is Level.WARN
    assert "--runtime-dir" in lost.message
    assert finding.level is Level.OK
    assert "/own/io.containerd" in finding.message


def test_a_kubelet_that_does_not_answer_is_a_warning(tmp_path):
    (finding,) = checks.check_pod_resources(tmp_path)

    assert finding.level is Level.WARN
    assert str(tmp_path / "pod-resources/kubelet.sock") in finding.message


def test_a_process_that_sees_no_other_pods_is_told_how_it_would():
    assert checks.pid_namespace_finding(sees_pods=True).level is Level.OK
    own = checks.pid_namespace_finding(sees_pods=False)
    assert (own.level, "hostPID: true" in own.remedy) == (Level.WARN, True)


def test_the_doctor_judges_the_process_namespace_as_the_memory_guard_does():
    (finding,) = checks.check_pid_namespace(simulated=False)

    assert finding == checks.pid_namespace_finding(ContainerProcesses().sees_pods())


def test_simulated_gpus_have_no_processes_to_be_seen():
    assert [finding.level for finding in checks.check_pid_namespace(simulated=True)] == [Level.SKIP]
