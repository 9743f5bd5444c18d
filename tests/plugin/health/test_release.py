"""The plugin lets go of GPUs for a while, says so on its Node, and comes back by itself."""

from dataclasses import replace
from typing import Any

import pytest

from api.names import PAUSE_LABELS, RELEASE_ANNOTATION, RELEASED_ANNOTATION
from dra_driver.base.errors import ApiServerError, MpsAgentUnreachable, NodeError, TimedOut
from dra_driver.base.threads import UNTIL_WOKEN
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.health import Problem
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    MpsServerName,
    MpsStatus,
)
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.health.messages import timestamp
from dra_driver.plugin.health.release import GpuRelease, ReleaseDoors
from tests.builders import POOL, gpu_uuid, record

EVERY = list(range(8))


class Agent:
    """Notes what it lets go of."""

    def __init__(self):
        self.gpus = []
        self.until = 0.0
        self.error = None
        self.servers = ()

    def let_go(self, gpus, until):
        if self.error:
            raise self.error
        self.gpus, self.until = sorted(gpus), until

    def status(self):
        if isinstance(self.error, MpsAgentUnreachable):
            raise self.error
        return MpsStatus(self.servers)


class Node:
    """GPUs of which NVML is open, or not."""

    def __init__(self, world):
        self.world = world
        self.closed = False
        self.opened = False  # NVML was used
        self.busy = False  # a call of NVML is under way
        self.answers = True  # the GPUs do, once NVML is open
        self.mps = Agent()

    def release(self, why):
        if self.busy:
            raise TimedOut("a call is under way")
        self.closed = True

    def resume(self):
        self.closed = False

    def inventory(self):
        self.opened |= not self.closed
        return self.world.inventory

    def known_gpus(self):
        return self.world.inventory.gpus

    def refresh(self):
        self.opened |= not self.closed
        gpus = self.world.inventory.gpus
        stale = {gpu.uuid for gpu in gpus} if self.closed or not self.answers else ()
        self.world.inventory = replace(self.world.inventory, stale=frozenset(stale))
        return self.world.inventory


class Scene:
    """One Node object, and the plugin that follows it."""

    def __init__(self, world, server, client):
        self.world, self.server, self.client = world, server, client
        self.node = POOL
        self.known = True
        self.newest = True
        self.records = ()
        self.gpus = Node(world)
        self.metadata(annotations={"kept": "x"})
        world.step()
        self.start()

    def start(self):
        labels: Any = self
        gpus: Any = self.gpus
        self.release = GpuRelease(
            ReleaseDoors(
                self.client,
                labels,
                gpus,
                self.world.monitor,
                lambda: self.newest,
                lambda: None,
                lambda: self.records,
                lambda: self.world.now,
            )
        )

    def restart(self):
        """A new process begins, in which nothing has opened NVML."""
        self.gpus.closed = self.gpus.opened = False
        self.start()
        self.release.begin()

    def metadata(self, **fields):
        self.server.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": POOL, **fields}})

    def ask(self, request, **labels):
        self.metadata(annotations={RELEASE_ANNOTATION: request, "kept": "x"}, labels=labels)

    def _metadata(self):
        if not self.known:
            raise ApiServerError("it is away")
        (node,) = self.server.objects("nodes")
        return node["metadata"]

    def now(self):
        return self._metadata().get("labels") or {}

    def annotations(self):
        return self._metadata().get("annotations") or {}

    @property
    def answer(self):
        return self.annotations().get(RELEASED_ANNOTATION)

    def step(self, after=0.0):
        self.world.now += after
        seconds = self.release.step()
        self.world.step()
        return seconds

    def released(self):
        """The GPUs that are said to be released, by minor."""
        published = self.world.published()
        return [int(uuid[-1]) for uuid, problem, _ in published if problem is Problem.RELEASED]


@pytest.fixture
def scene(world, server, client):
    return Scene(world, server, client)


def at(seconds):
    return timestamp(1000 + seconds)


def test_named_gpus_are_released_until_the_time_is_over(scene):
    scene.ask(f"gpu-0,{gpu_uuid(3)} {at(60)}")

    scene.step()
    assert (scene.gpus.closed, scene.released()) == (True, [0, 3])
    assert scene.gpus.mps.gpus == [gpu_uuid(0), gpu_uuid(3)]
    assert scene.answer == f"gpu-0,{gpu_uuid(3)} {at(60)}"

    assert scene.step(after=59) <= 1
    assert scene.gpus.closed
    scene.step(after=1)
    assert (scene.gpus.closed, scene.released(), scene.gpus.mps.gpus) == (False, [], [])
    assert scene.annotations() == {"kept": "x"}


def test_with_a_gpu_that_is_not_there_nothing_is_let_go_of(scene):
    scene.ask(f"gpu-0,gpu-33 {at(60)}")

    assert scene.step() == 10
    assert (scene.gpus.closed, scene.released()) == (False, [])
    assert scene.answer == f"gpu-0,gpu-33 {at(60)} no such GPU: gpu-33"

    scene.ask(f"gpu-0 {at(60)}")
    scene.step()
    assert (scene.gpus.closed, scene.released()) == (True, [0])


WRONG = {
    f"gpu-0,gpu-33 {at(600)}": f"gpu-0,gpu-33 {at(600)} no such GPU: gpu-33",
    "gpu-1 soon": "'soon' is no time: write for example 2026-11-24T03:00:00Z",
    "": "'' names no GPU: write for example all 2026-11-24T03:00:00Z, or gpu-0",
}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_was_released_before_a_wrong_request_stays_so_until_its_own_time(
    scene, wrong, restarts
):
    scene.ask(f"gpu-0 {at(60)}")
    scene.step()
    scene.ask(wrong)
    if restarts:
        scene.restart()
        assert not scene.gpus.opened

    scene.step(after=50)
    assert (scene.gpus.closed, scene.released()) == (True, [0])
    assert scene.answer == f"{WRONG[wrong]}; gpu-0 stays released until {at(60)}"

    scene.step(after=10)
    assert (scene.gpus.closed, scene.released()) == (False, [])
    assert scene.answer == WRONG[wrong]
    scene.metadata(annotations={RELEASED_ANNOTATION: scene.answer})
    scene.step(after=10)
    assert scene.answer is None


def test_a_plugin_that_starts_releases_nothing_by_a_wrong_name(scene):
    scene.ask(f"gpu-33 {at(60)}")
    scene.restart()
    assert not scene.gpus.closed
    scene.step()
    assert (scene.gpus.closed, scene.released()) == (False, [])
    assert scene.answer == f"gpu-33 {at(60)} no such GPU: gpu-33"


def test_what_was_released_before_a_restart_comes_back_where_nothing_is_asked_for_any_more(scene):
    scene.ask(f"gpu-0 {at(60)}")
    scene.step()
    scene.metadata()
    scene.restart()
    assert not scene.gpus.closed
    scene.step()
    assert scene.released() == []


@pytest.mark.parametrize("until", [at(30), at(-30)])
def test_a_wrong_name_ends_no_earlier_release_when_its_own_time_is_over(scene, until):
    scene.ask(f"gpu-0 {at(3600)}")
    scene.step()
    scene.ask(f"gpu-33 {until}")
    scene.step(after=60)
    assert (scene.gpus.closed, scene.released()) == (True, [0])
    assert scene.answer.endswith(f"gpu-0 stays released until {at(3600)}")
    scene.step(after=3600)
    assert (scene.gpus.closed, scene.annotations()) == (False, {"kept": "x"})


def test_the_operators_pause_ends_with_its_label_whatever_is_asked_for_besides(scene):
    scene.ask("gpu-0 soon", **{PAUSE_LABELS[0]: "paused-for-driver-upgrade"})
    scene.step()
    assert scene.released() == EVERY
    scene.ask("gpu-0 soon")
    scene.step()
    assert (scene.gpus.closed, scene.released()) == (False, [])


def test_a_plugin_that_starts_after_the_time_that_it_knew_opens_no_nvml_for_a_longer_one(
    scene,
):
    scene.ask(f"gpu-0 {at(60)}")
    scene.step()
    scene.ask(f"gpu-0 {at(600)}")
    scene.world.now += 120
    scene.restart()
    assert (scene.gpus.closed, scene.gpus.opened) == (True, False)


def test_a_release_of_gpus_that_are_not_known_yet_goes_on_over_a_restart(scene):
    inventory = scene.world.inventory
    scene.ask(f"gpu-0 {at(60)}")
    scene.world.inventory = replace(inventory, gpus=())
    scene.start()
    scene.step()
    assert scene.gpus.closed


def test_it_ends_when_the_annotation_is_removed(scene):
    scene.ask("all")
    scene.step()
    assert scene.released() == EVERY
    assert scene.answer == f"all {at(600)}"

    scene.metadata(annotations={RELEASED_ANNOTATION: scene.answer})
    scene.step(after=5)
    assert (scene.gpus.closed, scene.released(), scene.annotations()) == (False, [], {})


@pytest.mark.parametrize("label", PAUSE_LABELS)
def test_all_gpus_are_released_while_the_operator_pauses_the_node(scene, label):
    scene.metadata(labels={label: "paused-for-driver-upgrade"})
    scene.step()
    scene.step(after=36_000)
    assert (scene.gpus.closed, scene.released()) == (True, EVERY)

    scene.metadata(labels={label: "true"})
    scene.step()
    assert (scene.gpus.closed, scene.released()) == (False, [])


def test_the_taint_stays_until_the_gpus_answer(scene):
    scene.ask("gpu-0")
    scene.step()
    scene.gpus.answers = False
    scene.metadata()

    assert scene.step() == 1
    assert scene.released() == [0]
    scene.gpus.answers = True
    scene.step()
    assert scene.released() == []


def test_a_gpu_that_is_lost_is_not_waited_for(scene):
    scene.ask("gpu-0,gpu-1")
    scene.step()
    scene.gpus.answers = False
    scene.world.inventory = replace(scene.world.inventory, lost=((gpu_uuid(0), "it is lost"),))
    scene.metadata()

    scene.step()

    assert scene.released() == [1]


def test_the_agent_goes_on_by_itself_a_minute_after_the_plugin_asked_it_last(scene):
    scene.ask(f"gpu-0 {at(600)}")
    scene.step()
    assert scene.gpus.mps.until == 1060
    scene.step(after=570)
    assert scene.gpus.mps.until == 1600


def test_while_a_call_of_nvml_is_under_way_it_says_so_and_tries_again(scene):
    scene.gpus.busy = True
    scene.ask("gpu-0")

    assert scene.step() == 1
    assert scene.answer == f"gpu-0 {at(600)} a call is under way"
    scene.gpus.busy = False
    assert scene.step(after=1) == 10
    assert scene.answer == f"gpu-0 {at(600)}"


def test_clients_of_mps_servers_are_waited_for(scene):
    clients = (MpsClient(7), MpsClient(8))
    scene.gpus.mps.servers = (
        MpsServer(MpsServerName("s"), (gpu_uuid(0),), 3, True, clients=clients),
        MpsServer(MpsServerName("t"), (gpu_uuid(1),), 3, True, clients=clients),
    )
    scene.ask("gpu-0")

    scene.step()

    assert scene.answer == f"gpu-0 {at(600)} 2 clients of MPS servers have to end"


def test_without_the_agent_claims_under_mps_are_in_the_way_and_nothing_else_is(scene):
    scene.gpus.mps.error = MpsAgentUnreachable("nobody answers")
    namespace = MpsNamespace(MpsNamespaceName("c_0"), ClaimUid("uid"), (gpu_uuid(0),))
    scene.records = (record("served", steps=(ServeMpsNamespace(namespace),)),)
    scene.ask(f"gpu-0 {at(600)}")

    scene.step()

    assert (scene.gpus.closed, scene.released()) == (True, [0])
    assert scene.answer == f"gpu-0 {at(600)} nobody answers"

    scene.ask(f"gpu-1 {at(600)}")
    scene.step()
    assert scene.answer == f"gpu-1 {at(600)}"


def test_an_older_agent_is_in_the_way_only_where_it_has_servers(scene):
    scene.gpus.mps.error = NodeError("no such request")
    scene.gpus.mps.servers = (MpsServer(MpsServerName("t"), (gpu_uuid(1),), 3, True),)
    scene.ask(f"gpu-0 {at(60)}")
    scene.step()
    assert scene.answer == f"gpu-0 {at(60)}"

    scene.ask(f"gpu-1 {at(60)}")
    scene.step()
    assert scene.answer == f"gpu-1 {at(60)} no such request"


def test_a_server_that_has_not_ended_yet_is_waited_for(scene):
    scene.gpus.mps.servers = (MpsServer(MpsServerName("s"), (gpu_uuid(0),), 3, True),)
    scene.ask(f"gpu-0 {at(60)}")
    assert scene.step() == 1
    assert scene.answer == f"gpu-0 {at(60)} MPS servers have to end"

    scene.gpus.mps.servers = (MpsServer(MpsServerName("s"), (gpu_uuid(0),), 3, False),)
    scene.step(after=1)
    assert scene.answer == f"gpu-0 {at(60)}"


def test_after_a_restart_nvml_is_not_opened_and_the_time_goes_on(scene):
    scene.ask("gpu-0")
    scene.step()
    scene.world.now += 300
    scene.restart()
    assert (scene.gpus.closed, scene.gpus.opened) == (True, False)
    scene.step()
    assert scene.answer == f"gpu-0 {at(600)}"
    scene.step(after=300)
    assert (scene.gpus.closed, scene.released()) == (False, [])


def test_an_outage_of_the_api_server_changes_nothing_until_the_time_is_over(scene):
    scene.ask("gpu-0")
    scene.step()
    scene.known = False

    scene.step(after=300)
    assert (scene.gpus.closed, scene.released()) == (True, [0])
    assert scene.step(after=300) == 10  # what is on the Node is removed later
    assert (scene.gpus.closed, scene.released()) == (False, [])
    scene.known = True
    scene.step()
    assert scene.annotations() == {"kept": "x"}


def test_after_a_restart_in_an_outage_nvml_is_not_opened_until_the_time_is_over(scene):
    """Somebody may be resetting a GPU."""
    scene.ask(f"gpu-0 {at(2000)}")
    scene.step()
    scene.known = False
    scene.restart()
    scene.step(after=1999)
    assert (scene.gpus.closed, scene.released()) == (True, [0])
    scene.step(after=1)
    assert not scene.gpus.closed


def test_after_a_restart_in_an_outage_the_operators_pause_lasts_for_ten_minutes(scene):
    scene.metadata(labels={PAUSE_LABELS[0]: "paused-for-driver-upgrade"})
    scene.step()
    scene.known = False
    scene.restart()
    scene.step(after=599)
    assert (scene.gpus.closed, scene.released()) == (True, EVERY)
    scene.step(after=1)
    assert not scene.gpus.closed


def test_a_restart_in_an_outage_opens_nvml_where_nothing_was_released(scene):
    scene.known = False
    scene.start()

    scene.release.begin()
    scene.step()

    assert not scene.gpus.closed


@pytest.mark.parametrize("request_text", ["", "all 2026-24-11T00:00:00Z"])
def test_a_wrong_annotation_releases_nothing_and_is_said_once(scene, request_text, caplog):
    scene.ask(request_text)

    for _ in range(3):
        scene.step(after=10)

    assert not scene.gpus.closed
    assert [record.message for record in caplog.records].count(
        "GPUs cannot be released as wanted"
    ) == 1
    assert RELEASE_ANNOTATION in scene.annotations()


def test_the_older_of_two_processes_lets_go_and_says_nothing(scene):
    scene.newest = False
    scene.ask("gpu-0")

    scene.step()

    assert scene.gpus.closed
    assert (scene.released(), scene.answer, scene.gpus.mps.gpus) == ([], None, [])


def test_where_nothing_is_asked_for_it_sleeps_until_the_node_changes(scene):
    assert scene.step() == UNTIL_WOKEN
    assert not scene.gpus.closed
