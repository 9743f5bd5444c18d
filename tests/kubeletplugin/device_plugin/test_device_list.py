"""What a list has in it: each rule with values, and all of them together at random."""

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.kubeletplugin.device_plugin.device_list import DeviceList
from dra_driver.kubeletplugin.device_plugin.resources import (
    MAX_LIST_BYTES,
    DeviceId,
    ListedDevice,
)
from tests.fakes.device_plugins import GPU, devices

LEAVING = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gpus(clock: Clock) -> DeviceList:
    return DeviceList(GPU, LEAVING, clock)


def listed(gpus: DeviceList) -> dict[str, str]:
    """The health of each device, as the kubelet reads it."""
    message = messages.ListAndWatchResponse.FromString(gpus.encoded())
    ids = [device.ID for device in message.devices]
    assert ids == sorted(set(ids))
    return {device.ID: device.health for device in message.devices}


@pytest.mark.point(127)
def test_health_is_one_of_the_two_words_that_the_kubelet_knows(gpus: DeviceList) -> None:
    gpus.offer(devices("b", "a", sick=["b"]))

    assert listed(gpus) == {"a": "Healthy", "b": "Unhealthy"}


@pytest.mark.point(130)
@pytest.mark.parametrize(("numa", "nodes"), [(None, None), (0, [0]), (1, [1])])
def test_a_topology_is_left_out_or_has_a_node(
    gpus: DeviceList, numa: int | None, nodes: list[int] | None
) -> None:
    gpus.offer(devices("a", numa=numa))
    (device,) = messages.ListAndWatchResponse.FromString(gpus.encoded()).devices

    assert device.HasField("topology") == (nodes is not None)
    assert [node.ID for node in device.topology.nodes] == (nodes or [])


def test_the_same_devices_in_any_order_are_the_same_list(gpus: DeviceList) -> None:
    gpus.offer(devices("a", "b", "c"))
    before = gpus.encoded()
    gpus.offer(devices("c", "a", "b"))

    assert gpus.encoded() == before


@pytest.mark.point(129)
def test_a_device_that_is_not_offered_any_longer_is_unhealthy_before_it_leaves(
    gpus: DeviceList, clock: Clock
) -> None:
    gpus.offer(devices("a", "b", numa=1))
    gpus.offer(devices("a", numa=1))
    assert listed(gpus) == {"a": "Healthy", "b": "Unhealthy"}
    assert gpus.seconds_to_change() == LEAVING

    clock.now += LEAVING - 0.01
    assert listed(gpus) == {"a": "Healthy", "b": "Unhealthy"}
    clock.now += 0.01
    assert listed(gpus) == {"a": "Healthy"}
    assert gpus.seconds_to_change() is None


def test_a_device_that_was_unhealthy_for_long_leaves_at_once(
    gpus: DeviceList, clock: Clock
) -> None:
    gpus.offer(devices("a", "b", sick=["b"]))
    clock.now += LEAVING
    gpus.offer([])

    assert listed(gpus) == {"a": "Unhealthy"}


def test_of_a_frozen_list_no_device_leaves(gpus: DeviceList, clock: Clock) -> None:
    gpus.offer(devices("a", "b"))
    gpus.offer(devices("a"))
    gpus.freeze(True)
    clock.now += LEAVING
    assert listed(gpus) == {"a": "Healthy", "b": "Unhealthy"}
    assert gpus.seconds_to_change() is None

    gpus.freeze(False)
    assert listed(gpus) == {"a": "Healthy"}


def test_a_device_that_comes_back_in_time_is_healthy_again(gpus: DeviceList, clock: Clock) -> None:
    gpus.offer(devices("a"))
    gpus.offer([])
    gpus.offer(devices("a"))
    clock.now += LEAVING

    assert listed(gpus) == {"a": "Healthy"}


@pytest.mark.point(129)
def test_a_device_does_not_leave_while_its_allocate_runs_nor_right_after_it(
    gpus: DeviceList, clock: Clock
) -> None:
    gpus.offer(devices("a", "b"))
    with gpus.allocating([DeviceId("a")]):
        gpus.offer([])
        clock.now += 100
        assert listed(gpus) == {"a": "Unhealthy"}
    clock.now += LEAVING - 0.01
    assert listed(gpus) == {"a": "Unhealthy"}
    clock.now += 0.01

    assert listed(gpus) == {}


def test_two_allocates_of_a_device_are_counted(gpus: DeviceList, clock: Clock) -> None:
    gpus.offer(devices("a"))
    with gpus.allocating([DeviceId("a")]):
        with gpus.allocating([DeviceId("a")]):
            gpus.offer([])
        clock.now += LEAVING

        assert listed(gpus) == {"a": "Unhealthy"}


def numbered(count: int, sick: bool = False) -> list[ListedDevice]:
    return [ListedDevice(DeviceId(f"{number:046}"), not sick) for number in range(count)]


@pytest.mark.point(131)
def test_a_list_that_is_too_large_is_not_sent_and_told(gpus: DeviceList) -> None:
    gpus.offer(numbered(75_000))

    assert gpus.encoded() == b""
    assert gpus.problem.startswith("nvidia.com/gpu has 75000 devices, whose list takes up to 4.4 M")
    assert "fewer replicas" in gpus.problem


@pytest.mark.point(131)
def test_a_list_fits_whatever_health_its_devices_have(gpus: DeviceList) -> None:
    gpus.offer(numbered(50_000))
    assert (gpus.problem, len(listed(gpus))) == ("", 50_000)
    gpus.offer(numbered(50_000, sick=True))
    assert (gpus.problem, len(listed(gpus))) == ("", 50_000)

    gpus.offer(numbered(70_000))  # these would fit if all of them were healthy
    assert gpus.problem


@pytest.mark.point(131)
def test_of_a_list_that_got_too_large_the_known_devices_are_told(gpus: DeviceList) -> None:
    gpus.offer(numbered(2))
    gpus.offer(numbered(75_000, sick=True))
    assert set(listed(gpus).values()) == {"Unhealthy"}
    assert len(listed(gpus)) == 2
    assert gpus.problem

    gpus.offer(numbered(3))
    assert (len(listed(gpus)), gpus.problem) == (3, "")


IDS = st.sampled_from("abcdefgh").map(DeviceId)


class AnyOrder(RuleBasedStateMachine):
    """Offers and Allocates come and go: what is listed never endangers the kubelet."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.gpus = DeviceList(GPU, LEAVING, self.clock)
        self.offered: dict[DeviceId, bool] = {}
        self.unhealthy: dict[DeviceId, float] = {}  # since when, or since its last Allocate
        self.allocating: list[tuple[tuple[DeviceId, ...], ExitStack]] = []

    @rule(health=st.dictionaries(IDS, st.booleans()))
    def offer(self, health: dict[DeviceId, bool]) -> None:
        known = {DeviceId(id) for id in listed(self.gpus)}
        since = {id: at for id, at in self.unhealthy.items() if id in known}
        unhealthy = {id for id in known | health.keys() if not health.get(id)}
        self.unhealthy = {id: since.get(id, self.clock.now) for id in unhealthy}
        self.offered = health
        self.gpus.offer([ListedDevice(id, healthy) for id, healthy in health.items()])

    @rule(ids=st.lists(IDS, min_size=1, unique=True))
    def begin_allocate(self, ids: list[DeviceId]) -> None:
        health = listed(self.gpus)
        chosen = tuple(id for id in ids if health.get(id) == "Healthy")
        stack = ExitStack()
        stack.enter_context(self.gpus.allocating(chosen))
        self.allocating.append((chosen, stack))

    @precondition(lambda self: bool(self.allocating))
    @rule(place=st.integers(0))
    def end_allocate(self, place: int) -> None:
        ids, stack = self.allocating.pop(place % len(self.allocating))
        stack.close()
        self.unhealthy |= dict.fromkeys(self.unhealthy.keys() & ids, self.clock.now)

    @rule(seconds=st.floats(0.1, 15))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def everything_offered_is_listed_as_offered(self) -> None:
        health = {id: word == "Healthy" for id, word in listed(self.gpus).items()}
        assert {id: health[id] for id in self.offered} == self.offered

    @invariant()
    def what_is_allocated_is_listed(self) -> None:
        running = Counter(id for ids, _ in self.allocating for id in ids)
        assert running.keys() <= listed(self.gpus).keys()

    @invariant()
    def what_is_not_offered_is_unhealthy_and_leaves(self) -> None:
        running = {id for ids, _ in self.allocating for id in ids}
        for id, word in listed(self.gpus).items():
            if id not in self.offered:
                assert word == "Unhealthy"
                assert id in running or self.clock.now - self.unhealthy[DeviceId(id)] < LEAVING

    @invariant()
    def what_was_healthy_a_moment_ago_is_still_listed(self) -> None:
        recently = {id for id, at in self.unhealthy.items() if self.clock.now - at < LEAVING}
        assert recently <= listed(self.gpus).keys()

    @invariant()
    def it_fits(self) -> None:
        assert len(self.gpus.encoded()) <= MAX_LIST_BYTES


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
