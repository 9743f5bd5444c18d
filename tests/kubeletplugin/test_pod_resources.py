"""What the kubelet says of its pods' containers, over a real socket."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_driver.errors import NodeError, TimedOut
from dra_driver.kubeletplugin.pod_resources import PodResources
from dra_driver.kubeletplugin.pods import ClaimName, ListedPod
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

    assert PodResources(short).pods() == (
        ListedPod(
            a.namespace,
            "web",
            {
                "main": frozenset({ClaimName(a.namespace, "a"), ClaimName(b.namespace, "b")}),
                "side": frozenset(),
            },
        ),
        ListedPod("other", "db", {}),
    )


def test_each_question_is_asked_of_whoever_is_there_now(short: Path) -> None:
    pods = PodResources(short)
    for name in ("first", "second"):
        with FakePodResources(short) as kubelet:
            kubelet.pods = {("ns", name): {}}
            assert [pod.name for pod in pods.pods()] == [name]


def test_where_there_is_no_socket_the_error_names_it(short: Path) -> None:
    with pytest.raises(NodeError, match=r"pod-resources/kubelet\.sock.*mounted"):
        PodResources(short).pods()


def test_a_kubelet_that_does_not_answer_is_not_waited_for(
    short: Path, kubelet: FakePodResources
) -> None:
    kubelet.silent = True
    began = time.monotonic()

    with pytest.raises(TimedOut, match=r"no answer within 0\.2 s"):
        PodResources(short, timeout_seconds=0.2).pods()
    assert time.monotonic() - began < 30


def test_a_list_larger_than_grpc_takes_by_itself_is_read(
    short: Path, kubelet: FakePodResources
) -> None:
    names = [ref(f"{number:06d}-{'x' * 240}") for number in range(20_000)]
    kubelet.pods = {("ns", "large"): {"main": names}}

    assert len(PodResources(short, timeout_seconds=20).pods()[0].containers["main"]) == 20_000
