"""What a container reads of its devices: at the places and in the shape that KEP-5304 promises."""

import doctest
import json
from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import Claim, ClaimRef, ClaimUid
from dra_driver.kubeletplugin import device_metadata
from dra_driver.kubeletplugin.device_metadata import (
    MetadataDevice,
    claim_uid_of_file,
    container_path,
    render_metadata_documents,
)
from tests.conftest import Golden

UID = ClaimUid("0b7ef5a2-5a07-4b8c-9b5f-0c7d8f3f0a11")
CLAIM = Claim(ClaimRef("ml", "train-gpu-x7k2p", UID), (), pod_claim_name="gpu")
DRIVER = "gpu.example.com"
WHOLE = MetadataDevice(
    "train/large",
    "node-1",
    "gpu-0",
    {"uuid": {"string": "GPU-a"}, "resource.kubernetes.io/numaNode": {"int": 0}},
)
SHARE = MetadataDevice("look", "node-1", "gpu-1", {"uuid": {"string": "GPU-b"}})
BARE = MetadataDevice("look", "node-1", "gpu-2")


def of(*devices, claim=CLAIM):
    return render_metadata_documents(claim, devices, DRIVER, "/plugin/metadata")


def objects(text: str) -> list[dict]:
    """The objects of a document, as a reader takes them: one after the other."""
    documents, decoder = [], json.JSONDecoder()
    while text:
        document, end = decoder.raw_decode(text)
        assert text[end] == "\n", "a newline ends each object"
        documents.append(document)
        text = text[end + 1 :]
    return documents


def test_a_document_is_what_readers_expect(golden: Golden):
    (document,) = of(WHOLE, replace(BARE, request="train/large"))
    golden("device-metadata/request.json", document.text)


@pytest.mark.point(91)
def test_a_document_has_the_same_object_in_every_version_newest_first():
    (document,) = of(SHARE, BARE)
    first, second = objects(document.text)
    versions = [version.pop("apiVersion") for version in (first, second)]
    assert versions == [f"metadata.resource.k8s.io/{v}" for v in ("v1beta1", "v1alpha1")]
    assert first == second


def test_a_claim_of_its_own_name_has_no_pod_claim_name():
    (document,) = of(BARE, claim=replace(CLAIM, pod_claim_name=""))
    first, _ = objects(document.text)
    assert "podClaimName" not in first
    assert first["requests"][0]["devices"] == [
        {"driver": DRIVER, "pool": "node-1", "name": "gpu-2"}
    ]


def test_each_request_has_its_document_whatever_alternative_was_chosen():
    look, train = of(WHOLE, SHARE, BARE)
    assert [document.request for document in (look, train)] == ["look", "train"]
    assert look.host_path == f"/plugin/metadata/{UID}_look.json"
    named = [
        (request["name"], [device["name"] for device in request["devices"]])
        for document in (look, train)
        for request in objects(document.text)[0]["requests"]
    ]
    assert named == [("look", ["gpu-1", "gpu-2"]), ("train/large", ["gpu-0"])]


def test_the_order_of_attributes_makes_no_difference():
    turned = replace(WHOLE, attributes=dict(sorted(WHOLE.attributes.items())))
    assert of(turned) == of(WHOLE)


@pytest.mark.parametrize("name", ["../../etc", "a/b", ".", "GPU", "a" * 64, "a b"])
def test_an_annotation_that_is_no_name_leads_nowhere(name):
    with pytest.raises(ClaimError, match=r"ml/train-gpu-x7k2p: annotation .* remove the annotat"):
        of(WHOLE, claim=replace(CLAIM, pod_claim_name=name))


@pytest.mark.point(91)
def test_a_claim_from_a_template_is_found_by_the_name_that_the_pod_gives_it():
    base = "/var/run/kubernetes.io/dra-device-attributes"
    assert container_path(CLAIM, "train", DRIVER) == (
        f"{base}/resourceclaimtemplates/gpu/train/gpu.example.com-metadata.json"
    )
    assert container_path(replace(CLAIM, pod_claim_name=""), "train", DRIVER) == (
        f"{base}/resourceclaims/train-gpu-x7k2p/train/gpu.example.com-metadata.json"
    )


@pytest.mark.parametrize("name", ["gpu.json", "_gpu.json", f"{UID}.json", f"{UID}_gpu.json.bak"])
def test_a_file_of_another_name_is_nobodys_document(name):
    assert claim_uid_of_file(name) is None


def test_the_documentation_is_true():
    assert doctest.testmod(device_metadata).failed == 0
