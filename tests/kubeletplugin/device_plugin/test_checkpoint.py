"""Which container has which devices, as the kubelet keeps it for itself."""

import base64
import json
import os

import pytest

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.kubeletplugin.device_plugin.checkpoint import KubeletCheckpoint
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    ContainerResponse,
    DeviceId,
    HostDevice,
    HostMount,
    ResourceName,
)

GPU = "nvidia.com/gpu"


def entry(pod="uid-1", container="main", **by_numa_node):
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": GPU,
        "DeviceIDs": by_numa_node or {"-1": ["GPU-0"]},
        "AllocResp": "",
    }


def container(pod, name, *ids):
    return AllocatedContainer(
        PodUid(pod), name, ResourceName(GPU), tuple(DeviceId(id_) for id_ in ids)
    )


def write(directory, *entries):
    """As the kubelet does: another file takes the place of the old one."""
    document = {
        "Data": {"PodDeviceEntries": list(entries) or None, "RegisteredDevices": {GPU: ["GPU-0"]}},
        "Checksum": 1234567890,
    }
    new = directory / ".new"
    new.write_text(json.dumps(document))
    os.replace(new, directory / "kubelet_internal_checkpoint")


def encoded(answer):
    return base64.b64encode(answer.SerializeToString()).decode()


def answer_in(checkpoint):
    """Which the kubelet has kept of the only container."""
    (known,) = checkpoint.containers()
    return known.answer


@pytest.fixture
def checkpoint(tmp_path):
    return KubeletCheckpoint(tmp_path)


def test_containers_are_known_by_the_uid_of_their_pod_and_their_devices_of_all_numa_nodes(
    checkpoint, tmp_path
):
    write(tmp_path, entry(), entry("uid-2", "init", **{"1": ["GPU-3"], "0": ["GPU-2", "GPU-1"]}))

    assert checkpoint.containers() == (
        container("uid-1", "main", "GPU-0"),
        container("uid-2", "init", "GPU-1", "GPU-2", "GPU-3"),
    )


def test_which_devices_the_kubelet_was_told_of_last_is_known(checkpoint, tmp_path):
    assert checkpoint.registered() == {}
    write(tmp_path)
    assert checkpoint.registered() == {GPU: ("GPU-0",)}
    document = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {GPU: None, "a/b": ["x"]}}}
    (tmp_path / "kubelet_internal_checkpoint").write_text(json.dumps(document))
    assert checkpoint.registered() == {GPU: (), "a/b": ("x",)}


def test_what_the_kubelet_was_answered_is_kept_in_it(checkpoint, tmp_path):
    answer = messages.ContainerAllocateResponse(
        envs={"A": "1"},
        mounts=[messages.Mount(container_path="/in", host_path="/out", read_only=True)],
        devices=[
            messages.DeviceSpec(container_path="/dev/a", host_path="/dev/b", permissions="rw")
        ],
        cdi_devices=[messages.CDIDevice(name="x/y=z")],
    )
    write(tmp_path, entry() | {"AllocResp": encoded(answer)})

    assert answer_in(checkpoint) == ContainerResponse(
        ("x/y=z",), (("A", "1"),), (HostMount("/out", "/in"),), (HostDevice("/dev/b", "/dev/a"),)
    )


@pytest.mark.parametrize("kept", [{}, {"AllocResp": None}, {"AllocResp": ""}])
def test_where_the_kubelet_has_kept_no_answer_it_is_not_known(checkpoint, tmp_path, kept):
    without = {name: value for name, value in entry().items() if name != "AllocResp"}
    write(tmp_path, without | kept)

    assert answer_in(checkpoint) is None


def test_an_answer_by_annotations_is_one(checkpoint, tmp_path):
    """NVIDIA's device plugin can answer so, and ours does not."""
    answer = messages.ContainerAllocateResponse(annotations={"cdi.k8s.io/nvidia": "nvidia.com/gpu"})
    write(tmp_path, entry() | {"AllocResp": encoded(answer)})

    assert answer_in(checkpoint) == ContainerResponse()


def test_it_is_read_again_when_the_kubelet_has_written_it_and_not_before(checkpoint, tmp_path):
    write(tmp_path, entry())
    first = checkpoint.containers()

    assert checkpoint.containers() is first
    write(tmp_path)
    assert checkpoint.containers() == ()


def test_a_kubelet_that_gave_nothing_out_may_have_none(checkpoint):
    assert checkpoint.containers() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"Data": {"PodDeviceEntries": [{"PodUID": "uid-1"}]}}',
        json.dumps({"Data": {"PodDeviceEntries": [entry() | {"DeviceIDs": ["GPU-0"]}]}}),
        json.dumps({"Data": {"PodDeviceEntries": [entry() | {"DeviceIDs": {"-1": [7]}}]}}),
        json.dumps({"Data": {"PodDeviceEntries": [entry() | {"AllocResp": "Cg=="}]}}),
        "[" * 100_000,
    ],
    ids=[
        "empty",
        "a list",
        "no data",
        "half an entry",
        "ids without nodes",
        "numbers",
        "no answer",
        "deep",
    ],
)
def test_what_is_no_checkpoint_that_we_know_is_said(checkpoint, tmp_path, text):
    (tmp_path / "kubelet_internal_checkpoint").write_text(text)

    with pytest.raises(NodeError, match="kubelet_internal_checkpoint says in no known way"):
        checkpoint.containers()


def test_what_cannot_be_read_is_said_and_read_once_it_can_be(checkpoint, tmp_path):
    (tmp_path / "kubelet_internal_checkpoint").mkdir()
    with pytest.raises(NodeError, match="cannot read the kubelet's checkpoint"):
        checkpoint.containers()

    (tmp_path / "kubelet_internal_checkpoint").rmdir()
    write(tmp_path, entry())
    assert len(checkpoint.containers()) == 1
