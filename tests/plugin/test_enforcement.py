"""The loops that look after limits are woken by what happens on the node."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.kubeletplugin.claims import Claim
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Holding, Limit, Record
from dra_driver.model.profiles import Guard, GuardPolicy
from dra_driver.node.containers import Absent, Containers
from dra_driver.node.ledger import Ledger
from dra_driver.node.memory_limits import MemoryLimits
from dra_driver.plugin.enforcement import Enforced, enforce
from dra_driver.plugin.metrics import Metrics
from tests.fakes.limits import GIB, LimitedNode
from tests.fakes.values import fraction, pod, ref

SECONDS = 10.0  # much less than the loops let pass by themselves


class World:
    """A node with the first pod of a claim that others can join."""

    def __init__(self, directory):
        self.node = LimitedNode(directory)
        self.limits = MemoryLimits(self.node.nvml, self.node.cgroups, lambda id_: Absent.GONE)
        self.processes = lambda gpu: ()
        self.ledger = Ledger(directory / "claims", "boot")
        self.ledger.reload()
        limit = Limit(GIB, Guard(GuardPolicy.OFF))
        gpu = self.node.gpus[0]
        holding = Holding(ref("shared"), DeviceName("gpu-0"), gpu=gpu, limit=limit)
        self.record = Record(ref("shared"), (holding,), prepared=(), spec="", pods=(pod("first"),))
        self.pods = [pod("first")]
        self.reads = threading.Semaphore(0)
        self.noted = threading.Event()

    def read(self, wanted):
        return Claim(wanted, (fraction(),), pods=tuple(self.pods))

    def glance(self, wanted):
        self.reads.release()
        return self.read(wanted)

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


def test_a_pod_that_joins_a_claim_is_noticed_as_it_comes(world):
    nobody: Any = SimpleNamespace(pods=lambda: (), tell=lambda event: None)
    its: Any = world
    enforced = Enforced(
        its, world.ledger, world, world, nobody, nobody, nobody, Metrics(), in_charge=lambda: True
    )
    with ExitStack() as stack:
        claim_changed = enforce(enforced, Containers(world.node.tree.root), 3600.0, stack)
        world.ledger.write(world.record)
        world.node.pod("uid-first")
        claim_changed(None)
        assert world.reads.acquire(timeout=SECONDS), "read once, as it came to be joinable"
        world.pods.append(pod("later"))
        world.node.pod("uid-later")
        assert world.noted.wait(SECONDS)
