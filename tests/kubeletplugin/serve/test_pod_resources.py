"""What the kubelet says of its pods' containers, over a real socket."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.k8s.pods import ClaimName, KubeletPod
from dra_driver.kubeletplugin.serve.pod_resources import PodResourcesClient
from tests.fakes.claimdriver import ref
from tests.fakes.pod_resources import FakePodResources


@pytest.fixture
def kubelet(short: Path) -> Iterator[FakePodResources]:
    with FakePodResources(short) as kubelet:
        yield kubelet


def test_every_pod_is_listed_with_the_claims_of_each_container(
    short: Path, kubelet: FakePodResources
) -> None:
    a, b = ref("a"), ref("b")
    kubelet.pods = {(a.namespace, "web"): {"main": [a, b], "side": []}, ("other", "db"): {}}

    assert PodResourcesClient(short).pods() == (
        KubeletPod(
            a.namespace,
            "web",
            {
                "main": frozenset({ClaimName(a.namespace, "a"), ClaimName(b.namespace, "b")}),
                "side": frozenset(),
            },
        ),
        KubeletPod("other", "db", {}),
    )


def test_the_devices_of_each_container_come_together(
    short: Path, kubelet: FakePodResources
) -> None:
    kubelet.pods = {("ml", "train"): {"main": [], "side": []}}
    kubelet.devices = {
        ("ml", "train", "main"): [("x/gpu", "GPU-0"), ("x/gpu", "GPU-1"), ("x/nic", "0")],
    }

    (pod,) = PodResourcesClient(short).pods()

    assert pod.devices == {
        ("main", "x/gpu"): frozenset({"GPU-0", "GPU-1"}),
        ("main", "x/nic"): frozenset({"0"}),
    }


def test_each_question_is_asked_of_whoever_is_there_now(short: Path) -> None:
    pods = PodResourcesClient(short)
    for name in ("first", "second"):
        with FakePodResources(short) as kubelet:
            kubelet.pods = {("ns", name): {}}
            assert [pod.name for pod in pods.pods()] == [name]


def test_where_there_is_no_socket_the_error_names_it(short: Path) -> None:
    assert not PodResourcesClient(short).is_there()
    with pytest.raises(NodeError, match=r"pod-resources/kubelet\.sock.*mounted"):
        PodResourcesClient(short).pods()
    with FakePodResources(short):
        assert PodResourcesClient(short).is_there()


def test_a_kubelet_that_does_not_answer_is_not_waited_for(
    short: Path, kubelet: FakePodResources
) -> None:
    kubelet.silent = True
    began = time.monotonic()

    with pytest.raises(TimedOut, match=r"no answer within 0\.2 s"):
        PodResourcesClient(short, timeout_seconds=0.2).pods()
    assert time.monotonic() - began < 30


def test_a_list_larger_than_grpc_takes_by_itself_is_read(
    short: Path, kubelet: FakePodResources
) -> None:
    names = [ref(f"{number:06d}-{'x' * 240}") for number in range(20_000)]
    kubelet.pods = {("ns", "large"): {"main": names}}

    assert len(PodResourcesClient(short, timeout_seconds=20).pods()[0].containers["main"]) == 20_000
