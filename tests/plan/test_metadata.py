"""Which containers can read which documents, and what these say of a share."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.validate import check
from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import AllocationResult, Claim, ShareId
from dra_driver.kubeletplugin.device_metadata import claim_uid_of_file
from dra_driver.plan.prepare.cdi_spec import claim_spec
from dra_driver.plan.prepare.claim import ClaimPlan, plan_claim
from dra_driver.plan.prepare.driver_spec import driver_spec_id
from dra_driver.plan.prepare.results import container_devices, metadata_documents, prepared_devices
from tests.builders import POOL, allocation, fraction, inventory, offer, ref
from tests.fakes.node import FakeNode

DRIVER = "gpu.nvidia.com"
DIRECTORY = "/plugin/metadata"


def planned(*allocations: AllocationResult) -> ClaimPlan:
    return plan_claim(Claim(ref(), allocations), offer(), (), POOL)


def mounts_by_name(plan: ClaimPlan) -> dict[str, list[tuple[str, str]]]:
    """Of each CDI device, what of the host it shows where."""
    nodes = FakeNode(inventory()).device_files((0, 1))
    documents = metadata_documents(plan, DRIVER, DIRECTORY)
    spec = claim_spec(plan.claim.ref, container_devices(plan, documents, {}), nodes, DRIVER)
    check(spec)
    by_name = {
        f"{spec.kind}={device.name}": [
            (mount.host_path, mount.container_path) for mount in device.container_edits.mounts
        ]
        for device in spec.devices
    }
    return {**by_name, driver_spec_id(DRIVER): []}  # which shows no document


def shown(plan: ClaimPlan, requests: set[str]) -> list[tuple[str, str]]:
    """What the devices show to a container that names these requests of the claim."""
    ids = [
        cdi_id
        for device in prepared_devices(plan, DRIVER)
        if requests & {*device.requests}
        for cdi_id in device.cdi_ids
    ]
    by_name = mounts_by_name(plan)
    return [mount for cdi_id in dict.fromkeys(ids) for mount in by_name[cdi_id]]


def test_a_document_is_shown_read_only_where_programs_look_for_it():
    plan = planned(allocation())
    nodes = FakeNode(inventory()).device_files((0,))
    documents = metadata_documents(plan, DRIVER, DIRECTORY)
    (device,) = claim_spec(
        plan.claim.ref, container_devices(plan, documents, {}), nodes, DRIVER
    ).devices
    (mount,) = device.container_edits.mounts
    assert mount.options == ("ro", "bind")
    assert mount.host_path == f"{DIRECTORY}/uid-claim_gpu.json"
    assert mount.container_path == (
        "/var/run/kubernetes.io/dra-device-attributes/"
        "resourceclaims/claim/gpu/gpu.nvidia.com-metadata.json"
    )


@st.composite
def requested_allocations(draw):
    """Two requests or three, each for one device or more, some of them only to look on."""
    allocations = []
    for number in range(draw(st.integers(1, 6))):
        device = draw(st.sampled_from(["gpu-0", "gpu-1"]))
        request = draw(st.sampled_from(["a", "b/large", "c"]))
        if draw(st.booleans()):
            part = fraction("1Gi", device, request)
            allocations.append(replace(part, share=ShareId(f"share-{number}")))
        else:
            allocations.append(allocation(device, request, admin=True))
    return tuple(dict.fromkeys(allocations))


@given(allocations=requested_allocations(), data=st.data())
def test_a_container_can_read_of_every_request_it_names_once(allocations, data):
    plan = planned(*allocations)
    documents = {
        document.request: document for document in metadata_documents(plan, DRIVER, DIRECTORY)
    }
    requests = data.draw(st.sets(st.sampled_from(sorted(documents)), min_size=1))

    targets = [target for _, target in shown(plan, requests)]
    sources = [source.rpartition("/")[2] for source, _ in shown(plan, requests)]

    assert {claim_uid_of_file(source) for source in sources} == {plan.claim.ref.uid}, (
        "by which it is known"
    )
    assert len(set(targets)) == len(targets)
    assert {documents[request].container_path for request in requests} <= {*targets}


@given(allocations=requested_allocations(), data=st.data())
def test_the_order_of_allocations_hides_no_document(allocations, data):
    turned = planned(*data.draw(st.permutations(allocations)))
    everything = {allocated.base_request for allocated in allocations}

    assert sorted(shown(turned, everything)) == sorted(shown(planned(*allocations), everything))


def test_a_container_reads_nothing_of_a_request_that_it_does_not_name():
    plan = planned(allocation("gpu-0", "a"), allocation("gpu-1", "b"))

    assert [source for source, _ in shown(plan, {"b"})] == [f"{DIRECTORY}/uid-claim_b.json"]


def test_all_requests_for_one_device_bring_their_documents_and_their_order_makes_no_difference():
    names = "abcdefgh"
    looks = [allocation(request=name, admin=True) for name in names]

    for allocations in (looks, looks[::-1]):
        sources = [source for source, _ in shown(planned(*allocations), {"a"})]
        assert sources == [f"{DIRECTORY}/uid-claim_{name}.json" for name in names]


def test_a_document_says_what_was_granted_of_a_gpu():
    plan = planned(fraction("20Gi", "gpu-0", "part"), allocation("gpu-1", "whole"))
    part, whole = metadata_documents(plan, DRIVER, DIRECTORY)

    of_part, of_whole = (
        json.loads(document.text.splitlines()[0])["requests"][0]["devices"][0]["attributes"]
        for document in (part, whole)
    )

    assert of_part["memory"] == {"string": "20Gi"}
    assert of_part["strategy"] == {"string": "TimeSlicing"}
    assert "memory" not in of_whole
    assert of_whole["uuid"] == {"string": plan.grants[1].device.gpu.uuid}


def test_a_document_says_by_which_strategy_a_part_is_shared():
    plan = planned(fraction("20Gi", cores="30"))

    (document,) = metadata_documents(plan, DRIVER, DIRECTORY)

    (device,) = json.loads(document.text.splitlines()[0])["requests"][0]["devices"]
    assert device["attributes"]["strategy"] == {"string": "MPS"}
    assert device["attributes"]["cores"] == {"int": 30}


def test_an_annotation_that_is_no_name_is_refused():
    plan = planned(allocation())
    annotated = replace(plan, claim=replace(plan.claim, pod_claim_name="no name"))

    with pytest.raises(ClaimError, match="pod-claim-name"):
        metadata_documents(annotated, DRIVER, DIRECTORY)
