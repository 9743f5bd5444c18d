"""The loops that look after limits are woken by what happens on the node."""

import threading
from contextlib import ExitStack

import pytest

from dra_driver.k8s.claims import Claim
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit
from dra_driver.node.cgroups.containers import ContainerBundles, NoContainer
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.prepare.claim import undo_steps
from dra_driver.plugin.memory.start import start
from dra_driver.plugin.metrics import Metrics
from tests.builders import fraction, holding, pod, record
from tests.fakes.limits import GIB, LimitedNode
from tests.plugin.memory.parts import plugin_parts
from tests.waiting import eventually

SECONDS = 60.0


class World:
    """A node with the first pod of a claim that others can join."""

    def __init__(self, directory):
        self.node = LimitedNode(directory)
        self.limits = NodeMemoryLimits(
            self.node.nvml, self.node.cgroups, lambda id_: NoContainer.GONE
        )
        self.containers = ContainerBundles(self.node.tree.root)
        self.processes = lambda gpu: ()
        self.ledger = Ledger(directory / "claims", "boot")
        self.ledger.reload()
        limit = ClaimMemoryLimit(GIB, GuardRules(GuardPolicy.OFF))
        gpu = self.node.gpus[0]
        shared = holding("shared", gpu=gpu, limit=limit)
        self.record = record("shared", shared, pods=["first"])
        self.pods = [pod("first")]
        self.reads = threading.Semaphore(0)
        self.noted = threading.Event()

    def read(self, claim):
        return Claim(claim, (fraction(),), pods=tuple(self.pods))

    def read_cached(self, claim):
        self.reads.release()
        return self.read(claim)

    def is_newest(self):
        return True

    def note_pods(self, claim):
        if pod("later") in claim.pods:
            self.noted.set()
        return False


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.limits.stop()
    made.node.nvml.stop()


def begin(world, stack):
    parts = plugin_parts(world, ledger=world.ledger, metrics=Metrics())
    start(parts, stack, 3600.0, 3600.0)  # what happens at once was woken
    return parts.claim_changed


def test_a_pod_that_joins_a_claim_is_noticed_as_it_comes(world):
    with ExitStack() as stack:
        claim_changed = begin(world, stack)
        world.ledger.write(world.record)
        world.node.pod("uid-first")
        claim_changed(None)
        assert world.reads.acquire(timeout=SECONDS), "read once, as it came to be joinable"
        world.pods.append(pod("later"))
        world.node.pod("uid-later")
        assert world.noted.wait(SECONDS)


def test_a_limit_that_is_set_again_while_its_claim_is_taken_back_goes_with_the_record(world):
    """A look between the two, at a record that is still there, sets what was just taken away."""
    with ExitStack() as stack:
        claim_changed = begin(world, stack)
        world.ledger.write(world.record)
        first = world.node.pod("uid-first")
        claim_changed(world.record)
        eventually(lambda: world.node.limit(first) == GIB)
        for step in undo_steps(world.record, ()):
            world.limits.carry_out(step)
        claim_changed(world.record)  # as by another claim
        eventually(lambda: world.node.limit(first) == GIB)

        world.ledger.forget(world.record.claim.uid)
        claim_changed(world.record)

        eventually(lambda: world.node.limit(first) is None)
