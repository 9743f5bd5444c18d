"""What doctor says of sick GPUs: of this node by the plugin's record, of others by their slices."""

from dataclasses import replace

import pytest

from dra_driver.cli.doctor import health_checks as checks
from dra_driver.cli.doctor.scheduling.published_devices import devices_of_slices
from dra_driver.cli.findings import Level
from dra_driver.model.health import Effect, Fault, HealthRules, HealthState, Problem
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.state.node_api_file import ServedApi
from tests.builders import inventory
from tests.cli.findings import levels
from tests.cli.scheduling import DRIVER

TWO_GPUS = inventory(2)
SICK, OTHER = TWO_GPUS.gpus
FELL_OFF = Fault(SICK.uuid, Problem.XID, "79")
HOT = Fault(OTHER.uuid, Problem.THERMAL, since=60)


def node_findings(*faults, rules=None, api=AllocationApi.DRA):
    rules = {} if rules is None else {SICK.uuid: rules}
    return list(
        checks.check_gpu_health(
            lambda: HealthState(tuple(faults)),
            lambda: TWO_GPUS,
            lambda _inventory: rules,
            lambda: ServedApi(api),
        )
    )


def test_a_node_without_a_fault_is_in_order():
    (finding,) = node_findings()

    assert finding.level is Level.OK


def test_each_fault_of_the_node_is_told_with_its_time_its_taint_and_what_to_do():
    fatal, harmless = node_findings(FELL_OFF, HOT)

    assert levels([fatal, harmless]) == [Level.WARN, Level.WARN]
    assert fatal.message == (
        "gpu-0: Xid 79: the GPU has fallen off the bus, since 1970-01-01T00:00:00Z; "
        "a taint NoSchedule"
    )
    assert fatal.remedy.startswith("reboot the node")
    assert harmless.message == (
        "gpu-1: the GPU is slowed down because it is hot, since 1970-01-01T00:01:00Z; no taint"
    )
    assert harmless.remedy == "look at the cooling of the node"


def test_the_effect_is_that_of_the_profile():
    (finding,) = node_findings(FELL_OFF, rules=HealthRules(xids=((79, Effect.NO_EXECUTE),)))

    assert finding.message.endswith("; a taint NoExecute")


def test_a_lost_gpu_has_its_name_and_the_effect_of_its_profile():
    state = HealthState((Fault(SICK.uuid, Problem.LOST),))
    rules = HealthRules(effects=((Problem.LOST, Effect.NO_EXECUTE),))

    (finding,) = checks.check_gpu_health(
        lambda: state,
        lambda: replace(TWO_GPUS, lost=((SICK.uuid, "it fell off the bus"),)),
        lambda inventory: {gpu.uuid: rules for gpu in inventory.gpus},
        lambda: None,
    )

    assert finding.message == (
        "gpu-0: the GPU does not answer, since 1970-01-01T00:00:00Z; a taint NoExecute"
    )


def test_a_fault_that_is_over_is_told_so_until_its_taint_goes():
    (finding,) = node_findings(Fault(SICK.uuid, Problem.REMAP_FAILED, since=1, well_since=5))

    assert finding.message.endswith("; a taint NoSchedule, which goes soon: it is over")


def test_a_fault_without_a_taint_that_is_over_is_told_so():
    (finding,) = node_findings(replace(HOT, well_since=90))

    assert finding.message.endswith("; no taint; it is over")


def test_by_the_device_plugin_api_it_is_told_how_the_kubelet_sees_a_sick_gpu():
    over = Fault(SICK.uuid, Problem.REMAP_FAILED, since=1, well_since=5)

    findings = node_findings(FELL_OFF, HOT, over, api=AllocationApi.DEVICE_PLUGIN)

    assert consequences(findings) == [
        "makes it unhealthy (no new pod gets it)",
        "makes it unhealthy (no new pod gets it), but not for long: it is over",
        "does not make it unhealthy",
    ]


@pytest.mark.parametrize(
    ("well_since", "of_the_heat"),
    [(None, "does not make it unhealthy"), (90, "does not make it unhealthy; it is over")],
)
def test_a_fault_without_effect_does_not_deny_that_another_makes_its_gpu_unhealthy(
    well_since, of_the_heat
):
    heat = Fault(SICK.uuid, Problem.THERMAL, since=60, well_since=well_since)

    findings = node_findings(FELL_OFF, heat, api=AllocationApi.DEVICE_PLUGIN)

    assert consequences(findings) == ["makes it unhealthy (no new pod gets it)", of_the_heat]
    assert all(finding.message.startswith("gpu-0: ") for finding in findings)


def consequences(findings):
    return [finding.message.partition("Z; ")[2] for finding in findings]


def tainted(node, *devices, key="gpu.nvidia.com/xid", value="79"):
    taint = {
        "key": key,
        "value": value,
        "effect": "NoSchedule",
        "timeAdded": "2026-11-24T03:00:00Z",
    }
    return {
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "devices": [{"name": name, "taints": [taint]} for name in devices],
        }
    }


def cluster_findings(*slices):
    return list(
        checks.check_tainted_devices("node-a", lambda: devices_of_slices(DRIVER, slices, ()))
    )


def test_sick_gpus_of_other_nodes_are_told_by_their_taints_once_for_all_devices():
    first, second = cluster_findings(
        tainted("node-c", "gpu-7", key="gpu.nvidia.com/gpu-lost", value=""),
        tainted("node-b", "gpu-0", "gpu-0-mig-1g-10gb-0"),
    )

    assert first.message == (
        "gpu-0, gpu-0-mig-1g-10gb-0 on node-b: Xid 79: the GPU has fallen off the bus, "
        "since 2026-11-24T03:00:00Z; a taint NoSchedule"
    )
    assert first.remedy.startswith("reboot the node")
    assert second.message.startswith("gpu-7 on node-c: the GPU does not answer, since")


def test_taints_of_the_own_node_and_those_for_other_reasons_are_not_told_here():
    (finding,) = cluster_findings(
        tainted("node-a", "gpu-0"), tainted("node-b", "gpu-0-mon", key="gpu.nvidia.com/monitor")
    )

    assert finding.level is Level.OK
