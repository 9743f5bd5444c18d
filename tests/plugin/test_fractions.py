"""Claims for parts of GPUs, in any order, killed anywhere: every account stays right."""

import contextlib
import itertools
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dra_driver.errors import DriverError
from dra_driver.kubeletplugin.claims import Claim, ClaimUid
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, Profile, Rules, Selection
from dra_driver.model.steps import Interval
from dra_driver.node.claim_files import ClaimFiles
from dra_driver.node.ledger import Ledger
from dra_driver.node.metadata_files import MetadataFiles
from dra_driver.node.spec_files import SpecFiles
from dra_driver.plan.limits import pod_shares
from dra_driver.plugin.offers import Offers
from dra_driver.plugin.prepare import Preparer
from dra_driver.plugin.tools import Names, Tools
from dra_driver.plugin.waits import Waits
from tests.fakes.node import FakeNode
from tests.fakes.values import MIB, POOL, allocation, config, fraction, inventory, pod, ref

GIB = 1024 * MIB
TOTAL = 81559 * MIB
KEEPS = Keeps()
EXCLUSIVE = Profile("exclusive", (Entry(Selection(), Rules(fractions=False), "spec.gpus[0]"),))
STRICT = Profile("strict", (Entry(Selection(), Rules(strict=True), "spec.gpus[0]"),))
FOUND = (Interval.DEFAULT, Interval.MEDIUM)  # of the two GPUs, before anybody came


class Killed(BaseException):
    """kill -9: nobody catches it."""


class Fuse:
    """Counts effects; the process dies before the one at which it has burnt down."""

    def __init__(self):
        self.left = None

    def burn(self, *args):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


class FusedLedger(Ledger):
    fuse: Fuse

    def write(self, record):
        self.fuse.burn()
        super().write(record)
        self.fuse.burn()

    def forget(self, uid):
        self.fuse.burn()
        super().forget(uid)
        self.fuse.burn()


class FusedSpecs(SpecFiles):
    fuse: Fuse

    def write(self, uid, spec):
        self.fuse.burn()
        return super().write(uid, spec)

    def remove(self, uid):
        self.fuse.burn()
        super().remove(uid)


class World:
    """A node with two GPUs; claims are read as a test last wrote them."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.node = FakeNode(inventory(2))
        self.node.intervals = {
            gpu.uuid: found for gpu, found in zip(self.node.now.gpus, FOUND, strict=True)
        }
        self.profile = DEFAULT_PROFILE
        self.fuse = Fuse()
        self.node.before_step = self.fuse.burn
        self.claims = {}
        self.restart()

    def read(self, wanted):
        return self.claims[wanted.name]

    def restart(self):
        self.fuse.left = None
        self.ledger = FusedLedger(self.directory / "claims", "boot")
        self.specs = FusedSpecs(self.directory / "cdi", "k8s.gpu.nvidia.com")
        self.ledger.fuse = self.specs.fuse = self.fuse
        self.files = ClaimFiles(self.specs, MetadataFiles(self.directory / "plugin"))
        offers = Offers(self.node, lambda: self.profile, lambda: KEEPS, self.ledger.held)
        turn = lambda seconds: contextlib.nullcontext()  # noqa: E731
        tools = Tools(self.node, offers, self, self.ledger, self.files, turn)
        self.preparer = Preparer(Names("gpu.nvidia.com", POOL), tools, Waits(all=5, hand_over=0))
        self.preparer.recover()
        self.node.settle(pod_shares(self.ledger.records()))

    def prepare(self, wanted, after=None):
        """Whether it was prepared; *after* so many effects the process is killed."""
        self.claims[wanted.ref.name] = wanted
        return self._until_killed(lambda: self.preparer.prepare(wanted.ref), after)

    def unprepare(self, name, after=None):
        return self._until_killed(lambda: self.preparer.unprepare(ref(name)), after)

    def join(self, wanted, after=None):
        self.claims[wanted.ref.name] = wanted
        return self._until_killed(lambda: self.preparer.note_pods(wanted), after)

    def _until_killed(self, act, after):
        self.fuse.left = after
        try:
            act()
        except DriverError:
            return False
        except Killed:
            self.restart()
            return False
        finally:
            self.fuse.left = None
        return True


INTERVALS = st.none() | st.sampled_from(["Default", "Short", "Long"])
FUSES = st.none() | st.integers(0, 12)
PODS = st.sets(st.sampled_from(["p", "q", "r"]), max_size=2)


@st.composite
def wanted(draw):
    """A claim with any allocation that a scheduler, or two of them, could think of."""
    name = draw(st.sampled_from("abcdef"))
    devices = draw(st.lists(st.sampled_from(["gpu-0", "gpu-1"]), min_size=1, max_size=3))
    allocations = []
    for number, device in enumerate(devices):
        gib = draw(st.none() | st.sampled_from([1, 20, 40, 60]))
        request = f"r{number}"
        if draw(st.integers(0, 9)) == 0:
            allocations.append(allocation(device, request, admin=True))
        elif gib is None:
            allocations.append(allocation(device, request))
        else:
            allocations.append(fraction(f"{gib}Gi", device, request))
    interval = draw(INTERVALS)
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
    configs = (config(sharing=sharing),) if interval else ()
    pods = tuple(pod(each) for each in sorted(draw(PODS)))
    return Claim(ref(name), tuple(allocations), configs, pods)


class AnyOrder(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.directory = tempfile.mkdtemp(prefix="dra")
        self.world = World(self.directory)

    @rule(claim=wanted(), after=FUSES)
    def prepare(self, claim, after):
        known = self.world.ledger.known(claim.ref.uid)
        if known is None:  # a claim is not allocated anew while it is prepared
            self.world.prepare(claim, after)

    @rule(name=st.sampled_from("abcdef"), after=FUSES)
    def unprepare(self, name, after):
        self.world.unprepare(name, after)

    @precondition(lambda self: self.world.ledger.records())
    @rule(pods=PODS, after=FUSES, data=st.data())
    def pods_come_and_go(self, pods, after, data):
        record = data.draw(st.sampled_from(self.world.ledger.records()))
        claim = self.world.claims[record.claim.name]
        joined = tuple(pod(each) for each in sorted(pods))
        changed = Claim(claim.ref, claim.allocations, claim.configs, joined)
        if not self.world.join(changed, after):
            # Whoever notes it looks again and again.
            self.world.preparer.note_pods(changed)

    @rule(profile=st.sampled_from([DEFAULT_PROFILE, EXCLUSIVE, STRICT]))
    def change_profile(self, profile):
        self.world.profile = profile

    @rule()
    def restart(self):
        self.world.restart()

    @invariant()
    def nothing_is_given_out_twice(self):
        memory = defaultdict(list)
        for holding in self.holdings():
            given = dict(holding.consumed).get("memory")
            memory[holding.gpu].append(int(given.removesuffix("Gi")) * GIB if given else TOTAL)
        for gpu, amounts in memory.items():
            assert sum(amounts) <= TOTAL, f"{gpu} is given out more than once"

    @invariant()
    def every_pod_is_limited_to_what_its_claims_hold(self):
        held = defaultdict(lambda: defaultdict(list))
        for record in self.records():
            for holding in (h for h in record.holdings if not h.admin):
                for each in record.pods:
                    held[each.uid][holding.gpu].append(holding.limit)
        expected = {
            (pod_uid, gpu): sum(limit.memory_bytes for limit in limits)
            for pod_uid, gpus in held.items()
            for gpu, limits in gpus.items()
            if None not in limits
        }
        assert self.node().limits == expected

    @invariant()
    def every_interval_is_the_one_asked_for_or_the_one_found(self):
        asked = {}
        for record in self.records():
            for configured in self.world.claims[record.claim.name].configs:
                sharing = configured.parameters["sharing"]["timeSlicingConfig"]["interval"]
                gpus = [h.gpu for h in record.holdings if not h.admin]
                for gpu in gpus:
                    assert asked.setdefault(gpu, sharing) == sharing
        for (gpu, now), found in zip(self.node().intervals.items(), FOUND, strict=True):
            assert str(now) == asked.get(gpu, str(found))

    @invariant()
    def every_claim_is_there_with_its_file_or_not_at_all(self):
        records = self.records()
        assert all(record.completed for record in records)
        assert self.world.files.claims() == {record.claim.uid for record in records}

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.give_all_back()
            finally:
                shutil.rmtree(self.directory)

    def give_all_back(self):
        for name in "abcdef":
            self.world.unprepare(name)
        assert self.world.ledger.records() == ()
        assert not self.world.files.claims()
        assert self.node().limits == {}
        assert tuple(self.node().intervals.values()) == FOUND

    def records(self):
        return self.world.ledger.records() if hasattr(self, "world") else ()

    def holdings(self):
        return [h for record in self.records() for h in record.holdings if not h.admin]

    def node(self):
        return self.world.node


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def part(name, memory="20Gi", pods=(), **fields):
    return Claim(ref(name), (fraction(memory, **fields),), pods=tuple(pod(p) for p in pods))


def test_killed_before_any_effect_of_a_fraction_the_next_start_finds_all_or_nothing(world):
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
    asked = Claim(ref("a"), (fraction(),), (config(sharing=sharing),), (pod("p"),))
    for after in itertools.count():
        done = world.prepare(asked, after)
        prepared = world.ledger.known(ClaimUid("uid-a")) is not None
        assert bool(world.node.limits) == bool(world.specs.claims()) == prepared
        assert (world.node.intervals[inventory(1).gpus[0].uuid] == Interval.SHORT) == prepared
        if done:
            break
        world.unprepare("a")
    assert after >= 6


def test_killed_before_any_effect_of_giving_back_the_next_start_ends_it_or_it_was_not_begun(world):
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
    asked = Claim(ref("a"), (fraction(),), (config(sharing=sharing),), (pod("p"),))
    for after in itertools.count():
        assert world.prepare(asked)
        done = world.unprepare("a", after)
        prepared = world.ledger.known(ClaimUid("uid-a")) is not None
        assert bool(world.node.limits) == bool(world.specs.claims()) == prepared
        assert (world.node.intervals[inventory(1).gpus[0].uuid] == Interval.SHORT) == prepared
        if done:
            break
        world.unprepare("a")
    assert after >= 4


def test_killed_before_any_effect_of_a_pod_that_joins_its_limit_follows(world):
    for after in itertools.count():
        assert world.prepare(part("a", pods="p"))
        done = world.join(part("a", pods="pq"), after)
        if not done:
            world.join(part("a", pods="pq"))
        assert {uid for uid, _ in world.node.limits} == {"uid-p", "uid-q"}
        world.unprepare("a")
        assert not world.node.limits
        if done:
            break
    assert after >= 3


def test_a_claim_whose_files_are_lost_stays_the_fraction_that_it_is(world):
    world.prepare(part("a", pods="p"))
    world.profile = EXCLUSIVE
    for path in (world.directory / "plugin" / "metadata").iterdir():
        path.unlink()

    assert world.prepare(part("a", pods="p"))

    (holding,) = world.ledger.known(ClaimUid("uid-a")).holdings
    assert holding.limit is not None


def test_a_fraction_for_which_there_is_no_room_waits_until_one_is_given_back(world):
    for name in "abcd":
        assert world.prepare(part(name, "19Gi"))
    assert not world.prepare(part("e"))

    world.unprepare("a")

    assert world.prepare(part("e", "19Gi"))


def test_a_fraction_keeps_its_gpu_sliceable_whatever_the_profile_says(world):
    world.prepare(part("a"))
    world.profile = EXCLUSIVE

    assert world.prepare(part("b")), "the slice still says so until nobody holds it"
    world.unprepare("a")
    world.unprepare("b")

    assert world.prepare(part("c"))
    assert world.ledger.known(ClaimUid("uid-c")).holdings[0].limit is None, "it is exclusive now"


def test_a_strict_profile_refuses_where_the_driver_has_no_limits(world):
    world.profile = STRICT
    world.node.offers_limits = False

    assert not world.prepare(part("a", pods="p"))
    assert world.ledger.records() == ()

    world.profile = DEFAULT_PROFILE
    assert world.prepare(part("a", pods="p"))


def test_a_pod_that_joins_is_limited_and_one_that_leaves_is_not(world):
    world.prepare(part("a", pods="p"))

    assert world.join(part("a", pods="pq"))
    assert {uid for uid, _ in world.node.limits} == {"uid-p", "uid-q"}

    assert world.join(part("a", pods="q"))
    assert {uid for uid, _ in world.node.limits} == {"uid-q"}


def test_the_limit_of_a_pod_is_the_sum_of_its_claims(world):
    world.prepare(part("a", "20Gi", pods="p"))
    world.prepare(part("b", "10Gi", pods="p"))
    assert set(world.node.limits.values()) == {30 * GIB}

    world.unprepare("a")

    assert set(world.node.limits.values()) == {10 * GIB}


def test_nobody_is_told_of_pods_of_a_claim_that_is_not_prepared(world):
    assert not world.preparer.note_pods(part("a", pods="p"))
