"""The name of a container is in its bundle, where its runtime keeps that."""

import json

import pytest

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.node.containers import Containers

ID = "0123456789abcdef" * 4
CONTAINERD = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}"
CRIO = f"run/containers/storage/overlay-containers/{ID}/userdata"


def write(root, bundle, text):
    (root / bundle).mkdir(parents=True, exist_ok=True)
    (root / bundle / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("bundle", "annotation"),
    [
        (CONTAINERD, "io.kubernetes.cri.container-name"),
        (CRIO, "io.kubernetes.container.name"),
    ],
    ids=["containerd", "CRI-O"],
)
def test_a_container_has_the_name_of_its_annotation(tmp_path, bundle, annotation):
    write(tmp_path, bundle, json.dumps({"ociVersion": "1.2.0", "annotations": {annotation: "a"}}))
    assert Containers(tmp_path).name(ID) == "a"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"annotations": null}',
        '{"annotations": {"io.kubernetes.cri.container-name": 7}}',
        '{"annotations": {"io.kubernetes.cri.container-type": "sandbox"}}',
        '{"annotations": {"io.kubernetes.container.name": "POD"}}',
    ],
)
def test_what_is_no_container_of_a_pod_has_no_name(tmp_path, text):
    write(tmp_path, CONTAINERD, text)
    assert Containers(tmp_path).name(ID) is None


def test_a_container_that_is_gone_has_no_name(tmp_path):
    assert Containers(tmp_path).name(ID) is None


def test_a_runtime_that_is_not_where_it_is_looked_for_is_told_once(tmp_path, caplog):
    containers = Containers(tmp_path)

    containers.name(ID)
    containers.name(ID)

    assert len([one for one in caplog.records if "--runtime-dir" in one.getMessage()]) == 1


def test_nothing_is_told_where_only_the_container_is_gone(tmp_path, caplog):
    write(tmp_path, CONTAINERD, "{}")

    assert Containers(tmp_path).name("0" * 64) is None

    assert not caplog.records


def test_which_claims_are_used_is_asked_by_name(tmp_path):
    write(tmp_path, CONTAINERD, '{"annotations": {"io.kubernetes.cri.container-name": "a"}}')
    asked = []

    def claims_of(containers):
        asked.append(containers)
        return {one: {ClaimUid("c")} for one in containers}

    uses = Containers(tmp_path).uses(claims_of)
    assert uses([(PodUid("p"), ID), (PodUid("p"), "f" * 64)]) == {(PodUid("p"), ID): {"c"}}
    assert uses([(PodUid("p"), "f" * 64)]) == {}
    assert asked == [[("p", "a")]], "nobody is asked about containers without a name"
