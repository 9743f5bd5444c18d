"""What a container finds in its environment of the shares that it was given."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.k8s import quantity
from dra_driver.k8s.claims import AllocationResult, Claim, OpaqueConfig, ShareId
from dra_driver.model.mps import MpsNamespaceName, ServedNamespace
from dra_driver.model.offer import AdminAccess, Device, Offer
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.prepare.cdi_spec import claim_spec
from dra_driver.plan.prepare.claim import ClaimPlan, plan_claim
from dra_driver.plan.prepare.driver_spec import driver_spec, driver_spec_id
from dra_driver.plan.prepare.results import container_devices, metadata_documents, prepared_devices
from hack.cdi_apply import apply_edits
from tests.builders import POOL, allocation, config, fraction, inventory, offer, ref
from tests.fakes.mig import ONE, instance, mig_gpu, mig_offer
from tests.fakes.node import FILES, FakeNode

Configs = tuple[OpaqueConfig, ...]
DRIVER = "gpu.nvidia.com"
NODES = FakeNode(inventory()).device_files((0, 1))


MPS = config(sharing={"strategy": "MPS"})


def planned(
    *allocations: AllocationResult, name: str = "claim", called: str = "", configs: Configs = ()
) -> ClaimPlan:
    """As for a claim of which each request is used by a container of its own."""
    claim = Claim(ref(name), allocations, configs, pod_claim_name=called)
    return plan_claim(claim, offer(), (), POOL, ())


def served(plan: ClaimPlan) -> Mapping[MpsNamespaceName, ServedNamespace]:
    node = FakeNode(inventory())
    done = [
        node.serve(step.namespace) for step in plan.steps if isinstance(step, ServeMpsNamespace)
    ]
    return {answer.namespace.name: answer for answer in done if answer is not None}


def environment(requests_by_plan: Iterable[tuple[ClaimPlan, set[str]]]) -> Mapping[str, str]:
    """Of a container that names these requests of these claims."""
    config: dict[str, Any] = {}
    for plan, requests in requests_by_plan:
        given = container_devices(plan, metadata_documents(plan, DRIVER, "/m"), served(plan))
        spec = claim_spec(plan.claim.ref, given, NODES)
        edits = {f"{spec.kind}={device.name}": device.container_edits for device in spec.devices}
        (of_driver,) = driver_spec(FILES).devices
        edits[driver_spec_id()] = of_driver.container_edits
        ids = [
            i
            for prepared in prepared_devices(plan, DRIVER)
            if requests & {*prepared.requests}
            for i in prepared.cdi_ids
        ]
        for part in (spec.container_edits, *(edits[each] for each in dict.fromkeys(ids))):
            config = apply_edits(config, replace(part, device_nodes=()))
    return dict(line.split("=", 1) for line in config.get("process", {"env": ()})["env"])


def shares(variables: Mapping[str, str]) -> dict[str, str]:
    """Each share by its own name."""
    return {name: value for name, value in variables.items() if "_MEMORY_" in name}


def test_a_container_with_two_shares_of_one_gpu_is_told_of_both():
    plan = planned(fraction("30Gi", request="model"), fraction("8Gi", request="the-cache"))

    assert shares(environment([(plan, {"model", "the-cache"})])) == {
        "GPU_DEVICE_0_MEMORY_CLAIM_MODEL": "30Gi",
        "GPU_DEVICE_0_MEMORY_CLAIM_THE_CACHE": "8Gi",
    }


def test_a_container_that_names_one_request_is_told_of_its_share_only():
    plan = planned(fraction("30Gi", request="model"), fraction("8Gi", request="cache"))

    variables = environment([(plan, {"cache"})])

    assert shares(variables) == {"GPU_DEVICE_0_MEMORY_CLAIM_CACHE": "8Gi"}
    assert variables["GPU_DEVICE_0_MEMORY"] == "8Gi"


def test_claims_of_two_templates_with_one_name_of_request_do_not_hide_each_other():
    first = planned(fraction("30Gi"), name="pod-left-x7k2p", called="left")
    second = planned(fraction("8Gi"), name="pod-right-p2k7x", called="right")

    assert shares(environment([(first, {"gpu"}), (second, {"gpu"})])) == {
        "GPU_DEVICE_0_MEMORY_LEFT_GPU": "30Gi",
        "GPU_DEVICE_0_MEMORY_RIGHT_GPU": "8Gi",
    }


def test_two_devices_of_one_request_on_one_gpu_are_told_as_their_sum():
    parts = [replace(fraction("20Gi"), share=ShareId(f"share-{n}")) for n in (1, 2)]

    variables = environment([(planned(*parts), {"gpu"})])

    assert shares(variables) == {"GPU_DEVICE_0_MEMORY_CLAIM_GPU": "40Gi"}
    assert variables["GPU_DEVICE_0_MEMORY"] == "20Gi"


def test_the_chosen_alternative_of_a_request_is_told_under_the_request():
    half = replace(fraction("39Gi", request="gpu/half"), share=ShareId("share"))

    variables = environment([(planned(half), {"gpu"})])

    assert shares(variables) == {"GPU_DEVICE_0_MEMORY_CLAIM_GPU": "39Gi"}


def test_a_whole_gpu_and_one_that_is_only_watched_are_no_shares():
    plan = planned(allocation("gpu-0", "whole"), allocation("gpu-1", "look", admin=True))

    variables = environment([(plan, {"whole", "look"})])

    assert variables["GPU_DEVICE_1_CLAIM"] == "default/claim"
    assert not [name for name in variables if "MEMORY" in name]


def test_each_container_is_sent_to_the_server_of_its_own_request():
    plan = planned(
        fraction("30Gi", request="a", cores="30"),
        fraction("8Gi", "gpu-1", request="b"),
        allocation("gpu-1", "look", admin=True),
        configs=(config("GpuConfig", "a", sharing={"strategy": "MPS"}),),
    )

    first, other, looks = (environment([(plan, {request})]) for request in ("a", "b", "look"))

    (namespace,) = {grant.namespace for grant in plan.grants if grant.namespace}
    assert first["CUDA_MPS_PIPE_DIRECTORY"] == f"/run/mps/{namespace.name}"
    assert first["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert first["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=30720M"
    assert first["GPU_DEVICE_0_CORES"] == "30"
    for env in (other, looks):
        assert not [name for name in env if name.startswith("CUDA_MPS")]


def test_a_container_with_two_devices_of_one_server_is_sent_there_once():
    plan = planned(allocation("gpu-0"), allocation("gpu-1"), configs=(MPS,))

    variables = environment([(plan, {"gpu"})])

    (namespace,) = {grant.namespace for grant in plan.grants if grant.namespace}
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == f"/run/mps/{namespace.name}"
    assert {"GPU_DEVICE_0_UUID", "GPU_DEVICE_1_UUID"} <= variables.keys()


def test_who_looks_on_beside_its_own_share_by_mps_is_a_client_of_it():
    """Both are one device in the container runtime's eyes: the share's edits are not lost."""
    whole, look = allocation("gpu-0", "b"), allocation("gpu-0", "a", admin=True)

    for both in ((whole, look), (look, whole)):
        plan = planned(*both, configs=(config("GpuConfig", "b", sharing={"strategy": "MPS"}),))
        assert "CUDA_MPS_PIPE_DIRECTORY" in environment([(plan, {"b"})])


@st.composite
def claims(draw: st.DrawFn) -> list[ClaimPlan]:
    """Up to three claims of a few fractions each, for pods that call them a, b, c."""
    plans = []
    for called in "abc"[: draw(st.integers(1, 3))]:
        parts = [
            replace(
                fraction(
                    f"{draw(st.integers(1, 8))}Gi",
                    draw(st.sampled_from(["gpu-0", "gpu-1"])),
                    draw(st.sampled_from(["x", "y/large", "z-1"])),
                ),
                share=ShareId(f"share-{number}"),
            )
            for number in range(draw(st.integers(1, 4)))
        ]
        plans.append(planned(*parts, name=f"pod-{called}", called=called))
    return plans


@given(plans=claims(), data=st.data())
def test_the_shares_that_a_container_is_told_of_are_the_shares_that_it_was_given(plans, data):
    requests_by_plan = [
        (plan, data.draw(st.sets(st.sampled_from(["x", "y", "z-1"])))) for plan in plans
    ]

    quantities = shares(environment(requests_by_plan))

    for minor in (0, 1):
        given_bytes = sum(
            grant.amount.memory_bytes
            for plan, requests in requests_by_plan
            for grant in plan.grants
            if grant.allocation.base_request in requests and grant.device.gpu.minor == minor
        )
        prefix = f"GPU_DEVICE_{minor}_MEMORY_"
        assert given_bytes == sum(
            quantity.rounded_up(value)
            for name, value in quantities.items()
            if name.startswith(prefix)
        )


def test_an_instance_takes_the_capabilities_of_itself_and_of_no_other():
    claim = Claim(ref(), (allocation("gpu-0-mig-1g10gb-19-2"),))
    plan = plan_claim(claim, mig_offer(), (), POOL)
    created = instance(ONE, 2, gi=9)

    (device,) = container_devices(plan.settled({plan.grants[0].device.uuid: created}), (), {})

    assert (device.instance, device.capabilities) == (created, ("gpu0/mig/gi9", "gpu0/mig/gi9/ci0"))


def test_who_looks_on_may_monitor_instances_where_a_gpu_can_have_some():
    looking_on = Claim(ref(), (allocation("gpu-0-mon", admin=True),))
    boards = {True: mig_gpu(), False: inventory(1).gpus[0]}
    plans = {
        can: plan_claim(looking_on, Offer((Device(gpu, AdminAccess()),)), (), POOL)
        for can, gpu in boards.items()
    }

    assert [container_devices(plans[can], (), {})[0].capabilities for can in (True, False)] == [
        ("mig/monitor",),
        (),
    ]


def test_a_driver_without_mig_gives_a_monitor_its_gpu_all_the_same():
    looking_on = Claim(ref(), (allocation("gpu-0-mon", admin=True),))
    plan = plan_claim(looking_on, Offer((Device(mig_gpu(), AdminAccess()),)), (), POOL)

    spec = claim_spec(plan.claim.ref, container_devices(plan, (), {}), NODES)

    (device,) = spec.devices
    assert [node.path for node in device.container_edits.device_nodes] == ["/dev/nvidia0"]


def test_a_container_is_told_its_instance_by_the_name_of_the_partition():
    claim = Claim(ref(), (allocation("gpu-0-mig-1g10gb-19-2"),))
    plan = plan_claim(claim, mig_offer(), (), POOL)
    created = instance(ONE, 2, name="x")

    variables = environment([(plan.settled({plan.grants[0].device.uuid: created}), {"gpu"})])

    assert variables["GPU_DEVICE_0_MIG_1G10GB_19_2_UUID"] == "MIG-x"
