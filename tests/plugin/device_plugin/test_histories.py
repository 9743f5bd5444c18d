"""Whatever happens in any order: a device is used by one pod, and in the end nothing is left."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import DriverError
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.kubeletplugin.device_plugin.resources import AllocatedContainer, DeviceId
from dra_driver.model.profiles import SharingStrategy
from tests.fakes.allocations import GPU, AllocationWorld, node_pod, replica, whole

WHOLE = [whole(minor) for minor in range(3)]
REPLICAS = [replica(place, minor) for minor in range(2) for place in range(2)]


class Node:
    """A kubelet that gives out what it takes for free."""

    def __init__(self, world: AllocationWorld, ids: Sequence[DeviceId]) -> None:
        self.world = world
        self.ids = ids
        self.held: dict[str, tuple[DeviceId, ...]] = {}  # by pod, as the kubelet believes
        self.running: dict[str, set[DeviceId]] = {}  # by pod, what its processes use
        self.answers: dict[tuple[DeviceId, ...], Any] = {}
        self.number = 0

    def do(self, operation: str, which: int, count: int) -> None:
        pods = sorted(self.held)
        if operation == "admit":
            self.admit(which, count)
        elif operation in _OF_A_POD:
            if pods:
                _OF_A_POD[operation](self, pods[which % len(pods)])
        else:
            _OF_THE_NODE[operation](self)

    def stop_the_forgotten(self) -> None:
        for pod in [each for each in self.running if each not in self.held]:
            self.stop(pod)

    def reboot(self) -> None:
        self.running.clear()
        self.world.reboot()

    def lose_checkpoint(self) -> None:
        self.world.containers.clear()
        self.held.clear()

    def turn_api_server(self) -> None:
        self.world.api_down = not self.world.api_down

    def admit(self, which: int, count: int) -> None:
        taken = {id_ for ids in self.held.values() for id_ in ids}
        free = [id_ for id_ in self.ids if id_ not in taken]
        if not free:
            return
        first = which % len(free)
        ids = tuple(sorted((free[first:] + free[:first])[:count]))
        answer = self.world.allocate(*ids)
        assert self.answers.setdefault(ids, answer) == answer
        assert set(answer.cdi_names) <= self.world.cdi_names
        self.number += 1
        pod = node_pod(f"pod-{self.number}")
        self.held[pod.pod.name] = ids
        self.world.node_pods[pod.pod.uid] = pod
        self.world.containers.append(AllocatedContainer(pod.pod.uid, "main", GPU, ids))

    def start(self, pod: str) -> None:
        self.stop(pod)  # the container that ran before
        ids = self.held[pod]
        try:
            self.world.allocations.pre_start(GPU, ids)
        except DriverError:
            assert any(set(ids) & used for used in self.running.values()), "nobody else has them"
            return
        self.running[pod] = set(ids)
        users = self.world.users.alive.setdefault(self.world.uid(*ids), set())
        users.add(Pod(pod, PodUid(f"uid-{pod}")))
        assert set(self.answers[ids].cdi_names) <= self.world.cdi_names

    def end(self, pod: str, *, deleted: bool) -> None:
        self.stop(pod)
        self.forget(pod, deleted=deleted)

    def forget(self, pod: str, *, deleted: bool) -> None:
        """Nobody knows of the pod any more; its processes may go on."""
        del self.held[pod]
        uid = PodUid(f"uid-{pod}")
        self.world.containers = [each for each in self.world.containers if each.pod != uid]
        self.world.node_pods.pop(uid)
        if not deleted:
            self.world.node_pods[uid] = node_pod(pod, ended=True)

    def stop(self, pod: str) -> None:
        self.running.pop(pod, None)
        for users in self.world.users.alive.values():
            users.discard(Pod(pod, PodUid(f"uid-{pod}")))

    def look(self) -> None:
        self.world.now += 35
        self.world.reconciler.look()

    def used_by_two(self) -> Iterator[DeviceId]:
        for id_ in self.ids:
            if sum(id_ in used for used in self.running.values()) > 1:
                yield id_


_OF_A_POD: dict[str, Callable[[Node, str], None]] = {
    "start": Node.start,
    "end": partial(Node.end, deleted=True),
    "finish": partial(Node.end, deleted=False),
    "force-delete": partial(Node.forget, deleted=True),
}
_OF_THE_NODE: dict[str, Callable[[Node], None]] = {
    "processes end": Node.stop_the_forgotten,
    "kill": lambda node: node.world.start(),
    "reboot": Node.reboot,
    "look": Node.look,
    "lose checkpoint": Node.lose_checkpoint,
    "API server": Node.turn_api_server,
}
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([*(["admit"] * 4), *(["start"] * 5), "look", *_OF_A_POD, *_OF_THE_NODE]),
        st.integers(0, 7),
        st.integers(1, 2),
    ),
    min_size=15,
    max_size=50,
)


@pytest.mark.parametrize(
    ("ids", "rules"),
    [(WHOLE, {}), (REPLICAS, {"replicas": 2, "default_strategy": SharingStrategy.MPS})],
    ids=["whole GPUs", "replicas under MPS"],
)
@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS)
def test_no_two_pods_use_one_device_the_answer_stays_and_nothing_is_left_over(
    ids: list[DeviceId], rules: dict[str, Any], operations: list[tuple[str, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = AllocationWorld(Path(directory), gpus=3, **rules)
        world.others_seconds = 0.0
        world.start()
        node = Node(world, ids)
        for operation in operations:
            node.do(*operation)
            assert not list(node.used_by_two()), operation

        world.api_down = False
        for pod in {*node.held, *node.running}:
            node.stop(pod)
        for pod in list(node.held):
            node.forget(pod, deleted=True)
        world.node_pods.clear()
        for _ in range(4):
            node.look()
        assert world.nothing_left
        assert not world.node.namespaces
