"""Pods get no more of a GPU's memory than they hold, where the driver can see to that."""

import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import PodMemoryLimit, PodMemoryShare, SetMemoryLimits
from dra_driver.node.cgroups.containers import NoContainer
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.memory.pod_limits import CgroupLimits
from tests.fakes.limits import GIB, LimitedNode, container_id
from tests.fakes.open_files import no_more_files
from tests.waiting import eventually

SECONDS = 10.0
MOST = 2**64 - 1  # NVML_DEVICE_MEMORY_LIMIT_MAX


class Limits:
    """The unit under test on a simulated node, a clock to turn, and who uses which claims."""

    def __init__(self, directory, backend="dmem", **fields):
        self.node = LimitedNode(directory, backend, **fields)
        self.now = 0.0
        self.given = {}  # what containers were given, by their ids
        self.found = []  # the containers that were looked for
        self.joined = {}  # what a claim holds that is given to whoever joins it
        self.unreadable = False
        self.opened = []
        self.limits = self.again()

    def again(self, nvml=None, turn_seconds=SECONDS):
        """As after a restart."""
        nvml, cgroups = nvml or self.node.nvml, self.node.cgroups
        fresh = NodeMemoryLimits(nvml, cgroups, self.find, lambda: self.now, turn_seconds)
        self.opened.append(fresh)
        return fresh

    def find(self, id_):
        self.found.append(id_)
        if self.unreadable:
            raise NodeError("its bundle cannot be read now")
        return self.given.get(id_, NoContainer.GONE)

    def use(self, pod, container, *claims):
        """The runtime writes the bundle of a container, before its cgroup is there."""
        id_ = container_id(container)
        uids = frozenset(ClaimUid(claim) for claim in claims)
        self.given[id_] = Container(id_, container, "default", Pod(pod, PodUid("")), uids)

    def step(self, strict=False, gpu=0, **pods):
        limits = tuple(PodMemoryLimit(PodUid(pod), size) for pod, size in sorted(pods.items()))
        return SetMemoryLimits(self.node.gpus[gpu], limits, strict)

    def share(self, pod, gpu=0, **claims):
        sizes = tuple((ClaimUid(claim), size) for claim, size in sorted(claims.items()))
        return PodMemoryShare(PodUid(pod), self.node.gpus[gpu], sizes)

    def reload_driver(self):
        """It forgets every limit."""
        self.node.node.change(gpu=0, present=False)
        self.node.node.live.current()
        self.node.node.change(gpu=0, present=True)

    def settle(self, *shares, joinable=False):
        """What pods hold, and whoever joins the claims of ``joined``."""

        def read(containers):
            joined = (
                self.share(container.pod.uid, **{claim: self.joined[claim]})
                for container in containers
                for claim in container.claims
                if claim in self.joined
            )
            return (*shares, *joined)

        self.limits.settle(read, joinable)


def opened(limits):
    yield limits
    for world in limits.opened:
        world.stop()
    limits.node.nvml.stop()


@pytest.fixture(params=["dmem", "misc"])
def either(tmp_path, request):
    yield from opened(Limits(tmp_path, request.param))


def fixture(*arguments, **fields):
    """One that gives a world like this."""

    def world(tmp_path):
        yield from opened(Limits(tmp_path, *arguments, **fields))

    return pytest.fixture(world)


dmem, misc = fixture("dmem"), fixture("misc")
hasty = fixture(deadline_seconds=0.3)
old = fixture(driver_version="580.95.05")
unloaded = fixture(driver="not-loaded")


def test_a_pod_is_limited_and_unlimited(either):
    pod = either.node.pod("a")
    either.limits.carry_out(either.step(a=4 * GIB))
    assert either.node.limit(pod) == 4 * GIB
    assert either.node.limit(pod, gpu=1) is None
    assert either.node.allocate(pod, 5 * GIB) is None

    either.limits.carry_out(either.step(a=4 * GIB))
    assert either.node.limit(pod) == 4 * GIB
    either.limits.carry_out(either.step(a=None))
    either.limits.carry_out(either.step(a=None))
    assert either.node.limit(pod) is None


def test_a_new_process_undoes_what_an_earlier_one_did(either):
    pod = either.node.pod("a")
    either.limits.carry_out(either.step(a=4 * GIB))
    either.again().carry_out(either.step(a=None))
    assert either.node.limit(pod) is None


def test_pods_that_are_not_here_need_no_limit(either):
    pod = either.node.pod("a")
    either.limits.carry_out(either.step(strict=True, a=4 * GIB, gone=4 * GIB))
    assert either.node.limit(pod) == 4 * GIB
    either.limits.carry_out(either.step(strict=True, gone=None))


def test_without_any_cgroup_a_strict_step_fails_and_another_warns(either, caplog):
    refusal = r"memory: no cgroup of pod a is below .*cgroup\. The node's profile requires .*Strict"
    with pytest.raises(NodeError, match=refusal):
        either.limits.carry_out(either.step(strict=True, a=4 * GIB))
    either.limits.carry_out(either.step(a=4 * GIB))
    assert "no pod to limit the GPU memory of" in caplog.text


def test_a_limit_that_cannot_be_set_fails_a_strict_step_and_another_warns(either, caplog):
    pod = either.node.pod("a")
    either.limits.status()
    either.node.is_root = False
    with pytest.raises(NodeError, match="Insufficient Permissions"):
        either.limits.carry_out(either.step(strict=True, a=4 * GIB))
    either.now = 60.0
    either.limits.carry_out(either.step(a=5 * GIB))
    assert "a GPU memory limit is not as wanted" in caplog.text
    assert either.node.limit(pod) is None


def test_a_limit_below_what_is_in_use_is_not_taken_for_set(either):
    pod = either.node.pod("a")
    either.limits.carry_out(either.step(a=4 * GIB))
    assert either.node.allocate(pod, 3 * GIB) is not None
    with pytest.raises(NodeError, match="not limit the pod's memory"):
        either.limits.carry_out(either.step(strict=True, a=2 * GIB))
    assert either.node.limit(pod) == 4 * GIB


def test_where_the_driver_offers_nothing_only_a_strict_step_minds(old, caplog):
    old.node.pod("a")
    old.limits.carry_out(old.step(a=4 * GIB))
    old.limits.carry_out(old.step(strict=True, a=None))
    with pytest.raises(NodeError, match=r"driver 580.95.5 is too old: 615 or newer does\. The"):
        old.limits.carry_out(old.step(strict=True, a=4 * GIB))
    old.settle(old.share("a", one=4 * GIB))
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_nothing_held_means_nothing_is_looked_at(tmp_path):
    never = NodeMemoryLimits(None, Cgroups(tmp_path), None)  # type: ignore[arg-type]
    never.settle(lambda containers: ())
    never.settle(
        lambda containers: [
            PodMemoryShare(PodUid("a"), GpuUuid("GPU-0"), ((ClaimUid("whole"), None),))
        ]
    )


def test_containers_see_their_share_those_that_were_there_and_those_that_appear(dmem):
    dmem.node.pod("a")
    before = dmem.node.container("a", "before")
    dmem.limits.carry_out(dmem.step(a=4 * GIB))
    assert dmem.node.limit(before) == 4 * GIB
    leaf = dmem.node.container("a", "main")
    eventually(lambda: dmem.node.limit(leaf) == 4 * GIB)
    assert dmem.node.limit(leaf, gpu=1) is None
    of_crun = f"kubepods/burstable/poda/crio-{container_id('crun')}.scope/container"
    inner = dmem.node.tree.make(of_crun)
    eventually(lambda: dmem.node.limit(inner) == 4 * GIB)


def test_containers_with_different_claims_keep_to_their_own(either):
    pod = either.node.pod("a")
    first, second = either.node.container("a", "one"), either.node.container("a", "two")
    both, none = either.node.container("a", "both"), either.node.container("a", "none")
    either.use("a", "one", "c1")
    either.use("a", "two", "c2", "of another driver")
    either.use("a", "both", "c1", "c2")
    either.use("a", "none")
    either.settle(either.share("a", c1=1 * GIB, c2=2 * GIB))
    assert either.node.limit(pod) == 3 * GIB
    sizes = [either.node.limit(leaf) for leaf in (first, second, both, none)]
    assert sizes == [1 * GIB, 2 * GIB, 3 * GIB, 3 * GIB]
    assert either.node.allocate(first, 2 * GIB) is None
    assert either.node.allocate(second, 2 * GIB) is not None


def test_with_misc_a_container_stays_below_its_pods_limit_where_that_is_enough(misc):
    misc.node.pod("a")
    leaf = misc.node.container("a", "main")
    misc.settle(misc.share("a", c1=4 * GIB))
    assert misc.node.allocate(leaf, 3 * GIB) is not None
    assert misc.node.allocate(misc.node.container("a", "side"), 3 * GIB) is None


def test_what_a_container_uses_may_be_known_later(either):
    either.node.pod("a")
    leaf = either.node.container("a", "one")
    shares = (either.share("a", c1=1 * GIB, c2=2 * GIB),)
    either.use("a", "one", "c1")
    either.unreadable = True
    either.settle(*shares)
    assert either.node.limit(leaf) == 3 * GIB
    either.unreadable = False
    either.settle(*shares)
    assert either.node.limit(leaf) == 1 * GIB, "it is read again without waiting"


def test_with_misc_a_limit_of_a_container_is_not_lifted_above_its_pods(misc):
    misc.node.pod("a")
    leaf = misc.node.container("a", "one")
    misc.use("a", "one", "c1")
    misc.settle(misc.share("a", c1=1 * GIB, c2=2 * GIB))
    misc.settle(misc.share("a", c1=1 * GIB))
    assert misc.node.limit(leaf) == 1 * GIB
    assert misc.node.of_pod("a") == 1 * GIB
    misc.settle()
    assert misc.node.limit(leaf) is None


def test_a_pod_that_comes_later_is_limited_as_it_appears(either):
    either.node.pod("a")
    either.settle(either.share("a", c=4 * GIB), either.share("later", c=4 * GIB))
    later = either.node.pod("later")
    eventually(lambda: either.node.limit(later) == 4 * GIB)
    leaf = either.node.container("later", "main")
    eventually(lambda: either.node.limit(leaf) == 4 * GIB)


def test_whole_gpus_have_no_limit_and_end_one(either):
    pod = either.node.pod("a")
    either.settle(either.share("a", c=4 * GIB))
    either.settle(either.share("a", c=4 * GIB, whole=None))
    assert either.node.limit(pod) is None


def test_cgroups_that_go_are_forgotten_and_come_again_as_others(either):
    either.node.pod("a")
    either.settle(either.share("a", c=4 * GIB))
    either.node.end("a")
    either.settle(either.share("a", c=4 * GIB))
    again = either.node.pod("a")
    eventually(lambda: either.node.limit(again) == 4 * GIB)
    either.node.end("a")
    either.settle()
    either.limits.carry_out(either.step(a=None))


def test_a_limit_that_failed_is_tried_again_after_a_minute_and_said_once(either, caplog):
    pod = either.node.pod("a")
    either.limits.status()
    either.node.is_root = False
    for now in (0.0, 30.0, 59.0):
        either.now = now
        either.settle(either.share("a", c=4 * GIB))
    messages = [m for m in caplog.messages if m.startswith("a GPU memory limit is not as wanted")]
    assert len(messages) == 1
    either.node.is_root = True
    either.settle(either.share("a", c=4 * GIB))
    assert either.node.limit(pod) is None
    either.now = 60.0
    either.settle(either.share("a", c=4 * GIB))
    assert either.node.limit(pod) == 4 * GIB


def test_a_limit_that_cannot_be_taken_away_is_tried_again(either):
    pod = either.node.pod("a")
    either.settle(either.share("a", c=4 * GIB))
    either.node.is_root = False
    either.settle()
    either.settle()
    assert either.node.limit(pod) == 4 * GIB
    either.node.is_root = True
    either.now = 60.0
    either.settle()
    assert either.node.limit(pod) is None


def test_a_gpu_that_hangs_keeps_nobody_from_the_others(hasty, caplog):
    pod = hasty.node.pod("a")
    hasty.limits.status()
    hasty.node.node.change(gpu=0, hangs=True)
    hasty.settle(hasty.share("a", c=4 * GIB), hasty.share("a", gpu=1, d=2 * GIB))
    assert hasty.node.limit(pod, gpu=1) == 2 * GIB
    assert "no answer within 0.3 s" in caplog.text
    hasty.node.node.change(gpu=0, hangs=False)


def test_a_settle_with_old_news_does_not_undo_a_claim_prepared_meanwhile(either):
    pod = either.node.pod("a")
    shares = [either.share("a", old=1 * GIB)]
    entered, go_on = threading.Event(), threading.Event()
    reads = []

    def read(containers):
        reads.append(len(shares))
        if len(reads) == 1:
            entered.set()
            assert go_on.wait(SECONDS)
        return tuple(shares)

    round_ = threading.Thread(target=either.limits.settle, args=(read,))
    round_.start()
    assert entered.wait(SECONDS)
    shares[:] = [either.share("a", old=1 * GIB, new=2 * GIB)]
    either.limits.carry_out(either.step(a=3 * GIB))
    go_on.set()
    round_.join(SECONDS)
    assert either.node.limit(pod) == 3 * GIB


def test_rounds_without_news_ask_the_driver_nothing(either, caplog):
    either.node.pod("a")
    either.node.container("a", "main")
    shares = (either.share("a", c=4 * GIB),)
    either.settle(*shares)
    either.node.node.change(gpu=0, fails={"*": "GPU_IS_LOST"})
    either.now = 59.0
    either.settle(*shares)
    assert "GPU is lost" not in caplog.text
    either.now = 60.0
    either.settle(*shares)
    assert "GPU is lost" in caplog.text


def test_a_cgroup_that_is_gone_or_goes_while_it_is_limited_needs_no_limit(either):
    goes = either.node.tree.make("goes")
    either.node.nvml.system()
    nvml: Any = Vanishing(either.node, goes)
    limits = CgroupLimits(nvml, either.node.gpus[0], lambda: 0.0)
    for _ in range(2):  # it goes, and is gone
        assert limits.limit(goes, GIB) == ""
        assert not limits
    limits.clear(goes)
    limits.limit(either.node.tree.make("goes"), GIB)
    limits.clear(goes)
    assert not limits


class Vanishing:
    """NVML, at the moment when a cgroup goes."""

    def __init__(self, node, goes):
        self._node = node
        self._goes = goes

    def on_gpu(self, gpu, doing, call):
        self._node.tree.remove(self._goes)
        return self._node.nvml.on_gpu(gpu, doing, call)


class Held:
    """NVML, in which one call holds up its caller until it is let go."""

    def __init__(self, nvml):
        self._nvml = nvml
        self.wanted, self.entered, self.go = threading.Event(), threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._nvml, name)

    def on_gpu(self, gpu, doing, call):
        if self.wanted.is_set():
            self.wanted.clear()
            self.entered.set()
            assert self.go.wait(SECONDS)
        return self._nvml.on_gpu(gpu, doing, call)


@pytest.fixture
def held(either):
    """The limits while another claim on the same GPU is in the middle of its turn."""
    either.node.pod("other")
    nvml = Held(either.node.nvml)
    either.limits = either.again(nvml, turn_seconds=0.05)
    either.limits.status()
    either.settle(either.share("a", c=4 * GIB))
    nvml.wanted.set()
    step = either.step(other=GIB)
    other = threading.Thread(target=either.limits.carry_out, args=(step,))
    other.start()
    assert nvml.entered.wait(SECONDS)

    def end():
        nvml.go.set()
        other.join(SECONDS)

    yield either, end
    end()


def test_a_turn_that_does_not_come_fails_a_strict_step_alone(held, caplog):
    world, _ = held
    world.node.pod("a")
    refusal = r"memory: the memory limits of GPU .* after 0\.05 s\. The .* has to be created again"
    with pytest.raises(NodeError, match=refusal):
        world.limits.carry_out(world.step(strict=True, a=4 * GIB))
    caplog.clear()
    world.limits.carry_out(world.step(a=4 * GIB))
    assert "GPU memory limits not set: the memory limits of GPU" in caplog.text


def test_giving_back_without_a_turn_is_made_up_for_by_the_next_round(either, held):
    world, end = held
    other = world.node.pod("other")
    world.limits.carry_out(world.step(other=None))
    end()
    assert world.node.limit(other) == GIB, "nobody has come to take it away yet"
    world.settle()
    assert world.node.limit(other) is None


def test_a_container_keeps_to_its_own_claims_as_it_appears(either):
    either.node.pod("a")
    either.settle(either.share("a", c1=1 * GIB, c2=2 * GIB))
    either.use("a", "one", "c1")

    leaf = either.node.container("a", "one")

    eventually(lambda: either.node.limit(leaf) == 1 * GIB)


def test_a_container_is_read_once(either):
    shares = tuple(either.share(pod, c1=1 * GIB, c2=2 * GIB) for pod in ("a", "b"))
    containers = [("a", "1"), ("a", "2"), ("b", "3"), ("b", "4")]
    for pod, name in containers:
        either.node.pod(pod)
        either.node.container(pod, name)
        either.use(pod, name, "c1")
    for now in (0.0, 60.0, 120.0):
        either.now = now
        either.settle(*shares)
    assert either.found == [container_id(name) for _, name in containers]


@pytest.mark.parametrize("reserved", [True, False], ids=["for a pod", "for a PodGroup"])
def test_a_pod_that_joins_a_claim_unseen_is_limited_as_its_first_container_appears(
    either, reserved
):
    either.joined = {"c": 4 * GIB}
    shares = [either.share("a", c=4 * GIB)] if reserved else []
    before = either.node.pod("before")
    either.use("before", "one", "c")
    either.node.container("before", "one")
    either.settle(*shares, joinable=True)
    assert either.node.limit(before) == 4 * GIB

    joins, other = either.node.pod("joins"), either.node.pod("other")
    either.use("joins", "setup", "c")
    either.use("other", "main")
    leaf = either.node.container("joins", "setup")
    either.node.container("other", "main")
    eventually(lambda: either.node.limit(joins) == either.node.limit(leaf) == 4 * GIB)

    either.settle(*shares, joinable=True)
    assert either.node.limit(joins) == 4 * GIB
    assert either.node.limit(other) is None


def test_a_container_that_could_not_be_read_as_it_appeared_wakes_who_settles(either):
    either.joined = {"c": 4 * GIB}
    woken = threading.Event()
    either.limits.on_owners_unknown = woken.set
    either.node.tree.make("kubepods/burstable")
    either.settle(joinable=True)
    joins = either.node.pod("joins")
    either.unreadable = True
    either.use("joins", "one", "c")
    either.node.container("joins", "one")
    assert woken.wait(SECONDS)

    either.unreadable = False
    either.settle(joinable=True)
    assert either.node.limit(joins) == 4 * GIB


def test_a_limit_stays_as_long_as_a_container_that_was_given_the_claim_is_there(either):
    """Its pod was deleted by force: the claim is not reserved for it any more."""
    either.joined = {"c": 4 * GIB}
    a = either.node.pod("a")
    either.use("a", "main", "c")
    either.node.container("a", "main")
    either.settle(either.share("a", c=4 * GIB), joinable=True)

    either.settle(joinable=True)

    assert either.node.limit(a) == 4 * GIB


@pytest.mark.parametrize("hidden", ["elsewhere", "unreadable"])
def test_a_limit_stays_where_nobody_can_tell_what_containers_were_given(either, hidden):
    a = either.node.pod("a")
    either.node.container("a", "main")
    if hidden == "elsewhere":
        either.given[container_id("main")] = NoContainer.NOWHERE
    either.unreadable = hidden == "unreadable"
    either.settle(either.share("a", c=4 * GIB), joinable=True)

    either.settle(joinable=True)
    assert either.node.limit(a) == 4 * GIB

    either.limits.carry_out(either.step(a=None))
    either.settle(joinable=True)
    assert either.node.limit(a) is None, "the claim was given back"


def test_limits_stay_while_cgroups_cannot_be_listed(either):
    a = either.node.pod("a")
    leaf = either.node.container("a", "main")
    either.settle(either.share("a", c=4 * GIB))
    with no_more_files(), pytest.raises(NodeError, match="Too many open files"):
        either.settle(either.share("a", c=4 * GIB), either.share("b", d=1 * GIB))
    assert [either.node.limit(cgroup) for cgroup in (a, leaf)] == [4 * GIB, 4 * GIB]


def test_nobody_looks_at_pods_any_more_once_nothing_is_limited(either):
    either.node.pod("a")
    either.settle(either.share("a", c=4 * GIB))
    either.now = 60.0
    either.settle()
    either.now = 120.0
    either.settle()
    count = len(either.found)
    either.node.container("a", "main")
    either.settle()
    assert len(either.found) == count


class Counting(Cgroups):
    """How often directories are looked for."""

    looks = 0

    def all_pods(self):
        self.looks += 1
        return super().all_pods()


@pytest.fixture
def counting(either):
    """A pod with a container on each of two GPUs, settled; every look from now on is counted."""
    either.node.tree.make("kubepods/besteffort")
    either.node.pod("a")
    either.node.container("a", "main")
    node = either.node
    node.cgroups = Counting(node.tree.root, node.tree.make, node.tree.remove)
    either.limits = either.again()
    either.shares = (either.share("a", c=4 * GIB), either.share("a", gpu=1, c=2 * GIB))
    either.settle(*either.shares)
    assert node.cgroups.looks == 1
    return either


@pytest.mark.parametrize(
    ("times", "looks", "reads"),
    [
        pytest.param([0.0, 5.0, 59.0], 0, 3, id="nothing changed"),
        pytest.param([60.0], 1, 3, id="once, and records once more for each GPU"),
    ],
)
def test_how_often_a_round_looks_for_directories_and_reads_records(counting, times, looks, reads):
    calls = []

    def read(containers):
        calls.append(containers)
        return counting.shares

    for now in times:
        counting.now = now
        counting.limits.settle(read)
    assert (counting.node.cgroups.looks - 1, len(calls)) == (looks, reads)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda world: world.node.container("a", "another"), id="a container came"),
        pytest.param(lambda world: setattr(world, "now", 60.0), id="a limit is to be read again"),
        pytest.param(lambda world: setattr(world, "shares", world.shares[:1]), id="a claim went"),
        pytest.param(
            lambda world: world.limits.carry_out(world.step(a=4 * GIB)), id="a claim came"
        ),
        pytest.param(
            lambda world: world.node.tree.make("kubepods/another"), id="pods may come elsewhere"
        ),
    ],
)
def test_a_round_looks_again_once(counting, change):
    change(counting)

    def looks_again():
        before = counting.node.cgroups.looks
        counting.settle(*counting.shares)
        return counting.node.cgroups.looks > before

    eventually(looks_again)
    eventually(lambda: not looks_again())


def test_a_round_that_failed_is_done_again(either, caplog):
    pod = either.node.pod("a")
    shares = [either.share("a", c=4 * GIB)]
    reads = []

    def read(containers):
        reads.append(1)
        if len(reads) == 2:
            raise NodeError("it cannot be read now")
        return shares

    either.limits.settle(read)
    assert "GPU memory limits not looked after: it cannot be read now" in caplog.text
    either.limits.settle(read)
    assert either.node.limit(pod) == 4 * GIB


def test_a_driver_that_comes_later_limits_in_the_next_round(unloaded):
    pod = unloaded.node.pod("a")
    shares = (unloaded.share("a", c=4 * GIB),)
    unloaded.settle(*shares)
    unloaded.node.node.change(driver="ready")
    unloaded.now = 5.0
    unloaded.settle(*shares)
    assert unloaded.node.limit(pod) == 4 * GIB


def test_each_limit_that_the_driver_lost_is_set_again_in_its_time(either, caplog):
    a, b = either.node.pod("a"), either.node.pod("b")
    shares = (either.share("a", c=4 * GIB), either.share("b", d=2 * GIB))
    either.settle(*shares[:1])
    either.now = 30.0
    either.settle(*shares)
    either.reload_driver()
    for now, limits in (
        (59.0, [None, None]),
        (60.0, [4 * GIB, None]),
        (89.0, [4 * GIB, None]),
        (90.0, [4 * GIB, 2 * GIB]),
    ):
        either.now = now
        either.settle(*shares)
        assert [either.node.limit(cgroup) for cgroup in (a, b)] == limits
    assert caplog.messages == ["a GPU memory limit was lost: it is set again"] * 2


def test_where_the_kernel_does_not_tell_of_everything_every_round_looks(counting):
    class Gone(Counting):
        """As if the directory went, or there are no more watches."""

        def levels(self):
            return (*super().levels(), self.root / "gone")

    tree = counting.node.tree
    cgroups = counting.node.cgroups = Gone(tree.root, tree.make, tree.remove)
    counting.limits = counting.again()
    for _ in range(3):
        counting.settle(*counting.shares)
    assert cgroups.looks == 3


def test_a_pod_that_comes_is_told_of_while_somebody_wants_to_know(either):
    reported = threading.Event()
    either.node.pod("first")
    assert either.limits.report_new_pods(reported.set)
    either.node.pod("later")
    assert reported.wait(SECONDS)
    assert not either.limits.report_new_pods(None)


def test_a_cgroup_made_anew_under_the_same_name_has_no_limit_yet(either):
    limits = CgroupLimits(either.node.nvml, either.node.gpus[0], lambda: 0.0)
    pod = either.node.pod("a")
    assert limits.limit(pod, GIB) == ""
    either.node.end("a")
    again = either.node.pod("a")
    assert again == pod
    assert limits.limit(again, GIB) == ""
    assert either.node.limit(again) == GIB


class Inheriting:
    """A driver that forgets a cgroup whose limit is taken away, and answers with its parent's."""

    c_nvmlSetMemoryLimits_v1_t = SimpleNamespace  # noqa: N815 - NVML's names
    c_nvmlGetMemoryLimits_v1_t = SimpleNamespace  # noqa: N815

    def __init__(self):
        self.limits = {}

    def on_gpu(self, gpu, doing, call):
        return call(self, None)

    def nvmlDeviceSetMemoryLimits_v1(self, handle, limits):  # noqa: N802
        cgroup = Path(limits.nameSpace.decode())
        if limits.hardLimit == MOST:
            self.limits.pop(cgroup, None)
        else:
            self.limits[cgroup] = limits.hardLimit

    def nvmlDeviceGetMemoryLimits_v1(self, handle, limits):  # noqa: N802
        cgroup = Path(limits.nameSpace.decode())
        inherited = (self.limits[path] for path in (cgroup, *cgroup.parents) if path in self.limits)
        limits.hardLimit, limits.currentUsed = next(inherited, MOST), 0


def test_a_container_whose_pod_keeps_its_limit_may_show_that_when_its_own_is_gone(tmp_path, caplog):
    driver: Any = Inheriting()
    limits = CgroupLimits(driver, GpuUuid("GPU-0"), lambda: 0.0)
    pod, leaf, inner = tmp_path / "pod", tmp_path / "pod/leaf", tmp_path / "pod/leaf/container"
    inner.mkdir(parents=True)
    for cgroup in (pod, leaf, inner):
        assert limits.limit(cgroup, GIB) == ""

    limits.clear_others({pod})
    assert driver.limits == {pod: GIB}
    assert not limits.has_limit(leaf)
    assert not limits.has_limit(inner)

    limits.limit(leaf, GIB)
    limits.limit(inner, GIB)
    limits.clear(pod)
    assert driver.limits == {}
    assert not limits
    assert caplog.messages == []


pods = st.sampled_from(["a", "b", "c"])
shares = st.dictionaries(
    st.tuples(pods, st.integers(0, 1)),
    st.dictionaries(st.sampled_from(["c1", "c2"]), st.integers(1, 8), min_size=1),
)
events = st.one_of(
    st.tuples(st.just("pod"), pods),
    st.tuples(st.just("container"), pods),
    st.tuples(st.just("end"), pods),
    st.tuples(st.just("hold"), shares),
    st.tuples(st.just("driver reloaded"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


def happen(world, event, value):
    """Let *event* happen."""
    present = world.node.tree.root / f"kubepods/burstable/pod{value}"
    match event:
        case "pod":
            world.node.pod(value)
        case "container" if present.is_dir():
            world.node.container(value, "main")
        case "end" if present.is_dir():
            world.node.end(value)
        case "driver reloaded":
            world.node.node.change(driver="not-loaded")
            world.node.node.live.current()
            world.node.node.change(driver="ready")
            world.now += 60.0
        case "restart":
            world.limits.stop()
            world.limits = world.again()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["dmem", "misc"]), st.lists(events, max_size=8))
def test_whatever_happens_the_next_round_makes_it_right(backend, made):
    with tempfile.TemporaryDirectory() as directory:
        world = Limits(Path(directory), backend)
        claims = {}
        for event, value in made:
            claims = value if event == "hold" else claims
            happen(world, event, value)
            world.now += 60.0
            world.settle(*as_shares(world, claims))
            assert actual_limits(world) == expected_limits(world, claims)
        world.now += 60.0
        world.settle()
        assert set(actual_limits(world).values()) <= {None}
        world.limits.stop()
        world.node.nvml.stop()


def as_shares(world, claims):
    return [
        world.share(pod, gpu, **{claim: size * GIB for claim, size in sizes.items()})
        for (pod, gpu), sizes in sorted(claims.items())
    ]


def actual_limits(world):
    pods = [pod for pod in "abc" if world.node.cgroups.pod(PodUid(pod))]
    return {(pod, gpu): world.node.of_pod(pod, gpu) for pod in pods for gpu in (0, 1)}


def expected_limits(world, claims):
    return {
        key: sum(claims[key].values()) * GIB if key in claims else None
        for key in actual_limits(world)
    }
