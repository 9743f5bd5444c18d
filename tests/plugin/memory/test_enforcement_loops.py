"""What looks after claims is all started, runs only in the newest process, and ends with it."""

import threading
import time
from contextlib import ExitStack

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import Claim, Pod, PodUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord
from dra_driver.node.cgroups.containers import NoContainer
from dra_driver.plugin.memory.start import start
from tests.builders import fraction, holding, record, ref
from tests.plugin.memory.parts import plugin_parts

GPU = GpuUuid("GPU-0")
SHARED = ref("shared")
LIMIT = ClaimMemoryLimit(10 << 30, GuardRules(GuardPolicy.KILL))
LOOPS = {"memory-guard", "pods", "pod-limits"}
SECONDS = 60.0  # to wait for what is to happen at once


class Plugin:
    """Everything that is looked after, and by which of the loops it was."""

    def __init__(self):
        shared = holding(SHARED, gpu=GPU, limit=LIMIT)
        self.stored: tuple[ClaimRecord, ...] = (record(SHARED, shared, pods=["web"]),)
        self.newest = True
        self.on_owners_unknown = lambda: None
        self.done = []
        self._changed = threading.Condition()

    def _note(self, event):
        with self._changed:
            self.done.append((threading.current_thread().name, event))
            self._changed.notify_all()

    def wait(self, *expected, times=1):
        """Until each of *expected* happened so often."""

        def happened():
            return all(self.done.count(name) >= times for name in expected)

        with self._changed:
            return self._changed.wait_for(happened, SECONDS)

    @property
    def limits(self):
        return self

    containers = limits

    def is_newest(self):
        self._note("asked whether it is the newest")
        return self.newest

    def records(self):
        return self.stored

    def processes(self, gpu):
        raise NodeError("the GPU is lost")

    def find(self, id_):
        return NoContainer.GONE

    def runtime_directories(self):
        return ("/run/containerd",)

    def read(self, claim):
        return Claim(claim, (fraction(),), pods=(Pod("later", PodUid("uid-later")),))

    read_cached = read

    def note_pods(self, claim):
        self._note(f"noted the pods of {claim.ref.name}")
        return True

    def settle(self, read, joinable):
        self._note(f"settled the limits of {sorted({share.pod for share in read(())})}")
        return joinable

    def report_new_pods(self, on_new_pod):
        return False

    def emit(self, event):
        self._note("told of an event")

    def watch_memory_limits(self, offered):
        pass

    def memory_used(self, uses, blind):
        self._note(f"could not look at {blind} GPUs")

    def memory_excursion(self):
        self._note("counted an excursion")

    def memory_kill(self):
        self._note("counted a kill")


GUARDED = ("memory-guard", "could not look at 1 GPUs")
JOINED = ("pods", "noted the pods of shared")
SETTLED = ("pod-limits", "settled the limits of ['uid-web']")
ASKED = [(loop, "asked whether it is the newest") for loop in LOOPS]


def threads_of_loops():
    return [thread for thread in threading.enumerate() if thread.name in LOOPS]


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack
    for thread in threads_of_loops():
        thread.join(SECONDS)


def begin(plugin, stack, guard_seconds=60.0, limits_seconds=3600.0):
    """Starts it all; the answer is to be called when a claim changed."""
    parts = plugin_parts(plugin, guard_seconds)
    start(parts, stack, limits_seconds, 3600.0)  # what happens at once was woken
    return parts.claim_changed


def test_the_guard_looks_as_often_as_it_is_told_to(stack):
    plugin = Plugin()
    begin(plugin, stack, guard_seconds=0.1)

    assert plugin.wait(("memory-guard", "asked whether it is the newest"), times=5)


@pytest.mark.parametrize("wakes", ["a claim changed", "a limit came undone"])
def test_what_changes_limits_wakes_who_settles_them(stack, wakes):
    plugin = Plugin()
    changed = begin(plugin, stack)
    assert plugin.wait(SETTLED)

    if wakes == "a claim changed":
        changed(None)
    else:
        plugin.on_owners_unknown()

    assert plugin.wait(SETTLED, times=2)


def test_without_claims_that_limit_memory_nobody_looks_until_there_is_one(stack):
    plugin = Plugin()
    shared, plugin.stored = plugin.stored, ()
    changed = begin(plugin, stack, guard_seconds=0.01, limits_seconds=0.01)
    assert plugin.wait(*ASKED)
    time.sleep(0.2)
    looks = [event for loop, event in plugin.done if loop in ("memory-guard", "pod-limits")]
    assert looks.count("asked whether it is the newest") == 2

    plugin.stored = shared
    changed(shared[0])

    assert plugin.wait(GUARDED, SETTLED)


def test_an_older_process_of_the_plugin_leaves_everything_alone_until_it_is_the_newest(stack):
    plugin = Plugin()
    plugin.newest = False
    changed = begin(plugin, stack, guard_seconds=0.1)
    assert plugin.wait(*ASKED)
    changed(None)
    assert plugin.wait(("pod-limits", "asked whether it is the newest"), times=2)
    assert {event for _, event in plugin.done} == {"asked whether it is the newest"}

    plugin.newest = True

    assert plugin.wait(GUARDED)


def test_nothing_goes_on_when_the_process_ends():
    plugin = Plugin()
    with ExitStack() as stack:
        begin(plugin, stack, guard_seconds=0.1)
        assert plugin.wait(GUARDED, JOINED, SETTLED)
        threads = threads_of_loops()
        assert {thread.name for thread in threads} == LOOPS

    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_claim_without_a_limit_wakes_nobody(stack):
    plugin = Plugin()
    changed = begin(plugin, stack)
    assert plugin.wait(SETTLED)

    changed(record("whole"))
    time.sleep(0.1)

    assert plugin.done.count(SETTLED) == 1
