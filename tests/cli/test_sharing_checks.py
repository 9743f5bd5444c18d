"""What a node can enforce of what it grants: facts in, findings out."""

import pytest

from dra_driver.cli.doctor import sharing_checks as checks
from dra_driver.cli.findings import Level
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.memory.support import MemoryAccounting, MemoryLimitSupport
from dra_driver.plan.offer.devices import build_offer
from tests.builders import gpu
from tests.cli.findings import levels
from tests.fakes.mig import mig_gpu


def test_a_gpu_in_mig_mode_without_partitions_is_said_and_what_to_do():
    gpus = Inventory((mig_gpu(on=True, switches=False),))
    offer = build_offer(gpus, Profile("default"), ApiFeatures(), {})

    (finding,) = checks.offer_findings(offer, gpus)

    assert finding.level is Level.FAIL
    assert "is not offered: MIG mode is on" in finding.message
    assert list(checks.offer_findings(offered(include=False), Inventory((gpu(0),)))) == []


DEVICES = ApiFeatures(capacity=False)


def offered(features=None, **rules):
    gpus = Inventory((gpu(0), gpu(1)))
    profile = Profile("mine", (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),))
    return build_offer(gpus, profile, features or ApiFeatures(), {})


@pytest.mark.parametrize(
    ("features", "rules", "expected"),
    [
        pytest.param(ApiFeatures(), {}, ["sliceable: gpu-0, gpu-1"], id="parts"),
        pytest.param(ApiFeatures(), {"fractions": False}, ["exclusive: gpu-0, gpu-1"], id="whole"),
        pytest.param(ApiFeatures(), {"replicas": 2}, ["2 replicas: gpu-0, gpu-1"], id="replicas"),
        pytest.param(DEVICES, {"replicas": 2}, ["2 replicas: gpu-0, gpu-1"], id="devices"),
        pytest.param(ApiFeatures(), {"include": False}, [], id="none"),
    ],
)
def test_gpus_are_told_by_shape_each_once(features, rules, expected):
    findings = list(checks.offer_findings(offered(features, **rules)))

    assert [finding.message for finding in findings] == expected
    assert all(finding.level is Level.OK for finding in findings)


def test_what_cannot_be_offered_as_the_profile_says_is_a_warning():
    findings = list(checks.offer_findings(offered(replicas=2, memory_step=60 << 30)))

    assert levels(findings) == [Level.OK, Level.WARN, Level.WARN]
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
    assert checks.requires_driver_limits(offered(DEVICES, strict=True, replicas=2))


def test_gpus_that_nobody_watches_are_named():
    assert list(checks.unenforced_gpu_findings(offered())) == []
    (finding,) = checks.unenforced_gpu_findings(offered(limited=False))
    assert finding.message.endswith("gpu-0, gpu-1")
    (same,) = checks.unenforced_gpu_findings(offered(DEVICES, limited=False, replicas=2))
    assert same == finding


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(
            ["kubepods.slice/", "cgroup.controllers"],
            (Level.OK, "v2; pods are below {root}/kubepods.slice"),
            id="v2",
        ),
        pytest.param(
            ["memory/"],
            (
                Level.OK,
                "v1, on which drivers set no limits; the memory guard works; no pod has one",
            ),
            id="v1",
        ),
        pytest.param([], (Level.WARN, "{root} is missing"), id="not mounted"),
    ],
)
def test_the_cgroup_hierarchy_is_told(tmp_path, made, expected):
    root = tmp_path / "cgroup"
    for name in made:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).mkdir() if name.endswith("/") else (root / name).write_text("memory dmem\n")

    finding = checks.cgroups_finding(Cgroups(root))

    level, message = expected
    assert finding.level is level
    assert finding.message.startswith(message.format(root=root))


def test_a_runtime_that_keeps_its_state_elsewhere_is_a_warning_until_it_is_said_where(tmp_path):
    (tmp_path / "own/io.containerd.runtime.v2.task/k8s.io").mkdir(parents=True)

    lost = checks.container_runtime_finding(tmp_path, "")
    known = checks.container_runtime_finding(tmp_path, "/own")

    assert (lost.level, "--runtime-dir" in lost.message) == (Level.WARN, True)
    assert (known.level, "/own/io.containerd" in known.message) == (Level.OK, True)


def test_a_kubelet_that_does_not_answer_is_a_warning(tmp_path):
    finding = checks.pod_resources_finding(tmp_path)

    assert finding.level is Level.WARN
    assert str(tmp_path / "pod-resources/kubelet.sock") in finding.message


def test_a_process_that_sees_no_other_pods_is_told_how_it_would():
    assert checks.pid_namespace_finding(sees_pods=True).level is Level.OK
    own = checks.pid_namespace_finding(sees_pods=False)
    assert (own.level, "hostPID: true" in own.remedy) == (Level.WARN, True)
