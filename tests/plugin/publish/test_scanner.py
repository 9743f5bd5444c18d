"""What is published after a look, and what is said of what is not."""

import time
from typing import Any

from prometheus_client import generate_latest

from dra_driver.base.errors import NodeError, SettingsError, Unreachable
from dra_driver.base.threads import Loop
from dra_driver.model.gpus import ALL_GPUS, Inventory, UnavailableGpu
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE, GpuSelector, Profile, ProfileEntry, Rules
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.publish.offers import OfferBuilder
from dra_driver.plugin.publish.scanner import DeviceScanner
from tests.builders import POOL, inventory, ref
from tests.fakes.holds import FakeHolds
from tests.fakes.node import FakeNode
from tests.plugin.claims.test_fractions import EXCLUSIVE, World, part
from tests.waiting import eventually

KEEPS = ApiFeatures()


class Scene:
    """A scanner, and what it has published."""

    def __init__(self, ledger=None, clock=time.monotonic):
        node: Any = FakeNode(inventory(1))
        self.node = node
        self.profile = lambda: DEFAULT_PROFILE
        self.metrics = Metrics()
        self.published = []
        offers = OfferBuilder(
            self.node, lambda: self.profile(), lambda: KEEPS, ledger or FakeHolds()
        )
        self.scanner = DeviceScanner(offers, POOL, self.published.append, self.metrics, clock)

    def names(self):
        return [device["name"] for device in self.published[-1].devices]

    def metric(self, name):
        text = generate_latest(self.metrics.registry).decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def failing(error):
    def profile():
        raise error

    return profile


def test_nothing_is_published_again_where_nothing_changed():
    scene = Scene()

    scene.scanner.scan()
    scene.scanner.scan()

    assert len(scene.published) == 1
    assert scene.names() == ["gpu-0", "gpu-0-mon"]
    last, began = scene.scanner.scanned_at, time.monotonic()
    assert last < began
    scene.scanner.scan()
    assert scene.scanner.scanned_at > began


def test_an_api_server_that_is_away_is_asked_again_soon_and_changes_nothing():
    scene = Scene()
    scene.scanner.scan()
    scene.profile = failing(Unreachable("no answer"))

    before = scene.scanner.scanned_at
    assert (scene.scanner.scan() or 3600) < 5
    assert len(scene.published) == 1
    assert scene.scanner.not_ready == "no answer"
    assert scene.scanner.scanned_at == before


def test_without_a_profile_that_can_be_used_no_pod_is_sent_here(caplog):
    scene = Scene()
    scene.profile = failing(SettingsError("profile 'x': spec.gpus[0].replicas: 0"))

    scene.scanner.scan()

    assert scene.names() == []
    assert "spec.gpus[0].replicas" in str(scene.scanner.not_ready)
    scene.profile = lambda: DEFAULT_PROFILE
    scene.scanner.scan()
    assert scene.names() == ["gpu-0", "gpu-0-mon"]
    assert scene.scanner.not_ready is None


def test_a_node_that_cannot_be_looked_at_keeps_what_it_published():
    scene = Scene()
    scene.scanner.scan()
    scene.profile = failing(NodeError("the PCI bus cannot be read"))

    assert scene.scanner.scan() is None
    assert len(scene.published) == 1


def test_a_part_of_a_profile_without_effect_is_said_once(caplog):
    caplog.set_level("INFO")
    entry = ProfileEntry(GpuSelector(minors=frozenset({7})), Rules(), "spec.gpus[0]")
    scene = Scene()
    profile = Profile("p", (entry,))
    scene.profile = lambda: profile

    scene.scanner.scan()
    scene.scanner.scan()

    assert [record.warning for record in caplog.records if "no effect" in record.message]


def test_what_a_gpu_is_offered_as_instead_is_said_with_the_reason(caplog):
    entry = ProfileEntry(GpuSelector(), Rules(memory_least=1 << 50), "spec.gpus[0]")
    scene = Scene()
    profile = Profile("p", (entry,))
    scene.profile = lambda: profile

    scene.scanner.scan()

    (records,) = [record for record in caplog.records if "as its profile says" in record.message]
    assert records.offered == "exclusive"
    assert records.reason.startswith("profile 'p', spec.gpus[0]: ")
    assert scene.scanner.pending
    assert scene.scanner.pending_gpus == ()  # no claim is waited for


def test_a_gpu_that_a_claim_keeps_as_it_was_changes_when_that_is_given_back(tmp_path):
    world = World(tmp_path)
    world.prepare(part("a"))
    scene = Scene(world.ledger)
    scene.profile = lambda: EXCLUSIVE
    scene.scanner.scan()
    loop = Loop("scan", scene.scanner.scan, 3600)
    scene.scanner.scan_soon = loop.soon
    loop.start()
    assert scene.metric("dra_driver_pending_devices") == 1
    assert scene.scanner.pending_gpus == ("gpu-0",)

    scene.scanner.claim_changed()
    world.preparer.unprepare(ref("a"))
    scene.scanner.claim_changed()

    eventually(lambda: not scene.scanner.pending)
    loop.stop()
    assert scene.names() == ["gpu-0"]
    assert scene.metric("dra_driver_pending_devices") == 0


def test_what_is_not_offered_is_reported_once_and_again_before_the_event_is_forgotten():
    now, reported = [0.0], []
    scene = Scene(clock=lambda: now[0])
    scene.scanner.report = reported.append
    gone = UnavailableGpu(ALL_GPUS, "no complete NVIDIA driver")
    scene.node.now = Inventory((), (gone,))

    for moment in (0.0, 10.0, 1799.0):
        now[0] = moment
        scene.scanner.scan()
    assert reported == [gone]
    assert scene.scanner.not_ready == gone.reason
    assert scene.names() == []

    now[0] = 1801.0
    scene.scanner.scan()
    assert reported == [gone, gone]

    scene.node.now = inventory(1)
    scene.scanner.scan()
    scene.node.now = Inventory((), (gone,))
    scene.scanner.scan()
    assert reported == [gone] * 3


def test_a_gpu_that_the_profile_leaves_out_is_not_offered_and_nothing_is_wrong():
    reported = []
    scene = Scene()
    scene.scanner.report = reported.append
    entry = ProfileEntry(GpuSelector(), Rules(include=False), "spec.gpus[0]")
    profile = Profile("p", (entry,))
    scene.profile = lambda: profile

    scene.scanner.scan()

    assert scene.names() == []
    assert reported == []
    assert scene.scanner.not_ready is None


def test_what_is_not_given_out_by_dra_is_offered_and_not_published():
    scene = Scene()
    offered = []
    scene.scanner.offer_changed = lambda: offered.append(len(scene.published))
    scene.scanner.is_published = lambda: False
    scene.scanner.scan()
    assert scene.published == [None]
    assert offered == [1]

    scene.scanner.is_published = lambda: True
    scene.scanner.scan()
    assert scene.names() == ["gpu-0", "gpu-0-mon"]
    scene.scanner.scan()
    assert len(scene.published) == 2

    scene.scanner.is_published = lambda: False
    scene.scanner.scan()
    assert scene.published[-1] is None
