"""Claims for parts of GPUs, by turns and by MPS, in any order, killed anywhere: every account stays
right."""

import itertools
import shutil
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dra_driver.base.errors import DriverError
from dra_driver.k8s.claims import Claim, ClaimUid, ShareId
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.model.steps import ComputeMode, SetComputeMode, TimeSliceInterval
from dra_driver.node.state.claim_files import CdiSpecFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.memory.pod_limits import pod_memory_shares
from dra_driver.plan.prepare.amounts import requested_amount
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from tests.builders import MIB, allocation, config, fraction, gpu_uuid, inventory, pod, ref
from tests.fakes.node import FakeNode
from tests.fakes.pods import FakePods, container, pod_spec
from tests.fakes.preparers import ClaimWorld

GIB = 1024 * MIB
TOTAL = 81559 * MIB
BY_MPS = (SharingStrategy.MPS,)


def profile(name, **rules):
    return Profile(name, (ProfileEntry(GpuSelector(), Rules(**rules), "spec.gpus[0]"),))


EXCLUSIVE = profile("exclusive", fractions=False)
STRICT = profile("strict", strict=True)
MPS_ONLY = profile("mps-only", strategies=BY_MPS, default_strategy=SharingStrategy.MPS)
ANY_INTERVAL = profile("any-interval", fractions_set_interval=True)
# Of the two GPUs, before anybody came.
FOUND = (TimeSliceInterval.DEFAULT, TimeSliceInterval.MEDIUM)
FOUND_MODES = (ComputeMode.DEFAULT, ComputeMode.PROHIBITED)


def pods():
    """Pod p has a container for every claim, q one for every request, and r's has all but one."""
    claims = "abcdef"
    requests = ("r0", "r1", "r2")
    return (
        pod_spec("p", *(container(f"c-{claim}", (claim, "")) for claim in claims)),
        pod_spec("q", *(container(f"c-{a}-{b}", (a, b)) for a in claims for b in requests)),
        pod_spec("r", container("c", *((a, "") for a in claims[1:])), container("d", ("a", "r0"))),
    )


class Killed(BaseException):
    """kill -9: nobody catches it."""


class Fuse:
    """Counts effects; the process dies before the one at which it has burnt down."""

    def __init__(self):
        self.remaining = None

    def burn(self, *args):
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining < 0:
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


class FusedSpecs(CdiSpecFiles):
    fuse: Fuse

    def write(self, uid, spec):
        self.fuse.burn()
        return super().write(uid, spec)

    def remove(self, uid):
        self.fuse.burn()
        super().remove(uid)


class World(ClaimWorld):
    """A node with two GPUs; claims are read as a test last wrote them."""

    ledger_type, specs_type = FusedLedger, FusedSpecs

    def __init__(self, directory):
        node = FakeNode(inventory(2))
        super().__init__(Path(directory), node, CallTimeouts(all=5, hand_over=0))
        uuids = [gpu.uuid for gpu in node.now.gpus]
        node.intervals = dict(zip(uuids, FOUND, strict=True))
        node.modes = dict(zip(uuids, FOUND_MODES, strict=True))
        self.pods = FakePods(pods())
        self.profile = ANY_INTERVAL
        self.fuse = Fuse()
        node.before_step = self.fuse.burn
        self.restart()

    def restart(self):
        self.fuse.remaining = None
        super().restart()
        self.settle()

    def open_disk(self):
        super().open_disk()
        self.ledger.fuse = self.specs.fuse = self.fuse

    def prepare(self, claim, after=None):
        """Whether it was prepared; *after* so many effects the process is killed."""
        self.api.put(claim)
        return self._until_killed(lambda: self.preparer.prepare(claim.ref), after)

    def unprepare(self, name, after=None):
        return self._until_killed(lambda: self.preparer.unprepare(ref(name)), after)

    def join(self, claim, after=None):
        self.api.put(claim)
        done = self._until_killed(lambda: self.preparer.prepared_claims.note_pods(claim), after)
        self.settle()
        return done

    def settle(self):
        """The loop that looks after limits has its turn."""
        self.node.settle(pod_memory_shares(self.ledger.records()))

    def look_after_namespaces(self):
        """What is done about an agent again and again: what it should not have, what it lacks."""
        expected = self.namespaces()
        for namespace in tuple(self.node.namespaces.values()):
            if expected.get(namespace.name) != namespace:
                self.preparer.prepared_claims.end_unknown(namespace)
        for namespace in expected.values():
            if namespace.name not in self.node.namespaces:
                self.preparer.prepared_claims.serve_again(namespace.claim)

    def namespaces(self):
        """By the records, what the agent should serve."""
        return {
            namespace.name: namespace
            for record in self.ledger.records()
            for namespace in record.namespaces
        }

    def _until_killed(self, act, after):
        self.fuse.remaining = after
        try:
            act()
        except DriverError:
            return False
        except Killed:
            self.restart()
            return False
        finally:
            self.fuse.remaining = None
        return True


INTERVALS = st.none() | st.sampled_from(["Default", "Short", "Long"])
PROFILES = st.sampled_from([ANY_INTERVAL, DEFAULT_PROFILE, MPS_ONLY, EXCLUSIVE, STRICT])
FUSES = st.none() | st.integers(0, 16)
PODS = st.sets(st.sampled_from(["p", "q", "r"]), max_size=2)


LIMITS = {"defaultActiveThreadPercentage": 30, "defaultPinnedDeviceMemoryLimit": "10Gi"}
BY_TURNS = INTERVALS.map(
    lambda interval: {
        "strategy": "TimeSlicing",
        **({"timeSlicingConfig": {"interval": interval}} if interval else {}),
    }
)
AT_ONCE = st.sampled_from([{}, LIMITS]).map(lambda limits: {"strategy": "MPS", "mpsConfig": limits})
ALLOWED = {"turns": BY_TURNS, "mps": AT_ONCE, "mixed": BY_TURNS | AT_ONCE}


@st.composite
def allocated_claims(draw):
    """A claim with any allocation that a scheduler, or two of them, could think of."""
    name = draw(st.sampled_from("abcdef"))
    kind = draw(st.sampled_from(["turns", "mps", "mps", "mixed"]))
    devices = draw(st.lists(st.sampled_from(["gpu-0", "gpu-1"]), min_size=1, max_size=3))
    allocations = []
    for number, device in enumerate(devices):
        gib = draw(st.sampled_from([1, 5, 5, 20, 40, None]))
        request = draw(st.sampled_from(["r0", "r0", "r1", "r2"]))
        if draw(st.integers(0, 9)) == 0:
            allocations.append(allocation(device, request, admin=True))
        elif gib is None:
            allocations.append(allocation(device, request))
        else:
            cores = "0" if kind == "turns" else draw(st.sampled_from(["0", "20", "20", "60"]))
            part = fraction(f"{gib}Gi", device, request, cores=cores)
            allocations.append(replace(part, share=ShareId(f"share-{number}")))
    configs = [
        config("GpuConfig", *requests, sharing=draw(ALLOWED[kind]))
        for requests in draw(st.sampled_from([(), ((),), (("r0",),), (("r0",), ("r1", "r2"))]))
    ]
    pods = tuple(pod(each) for each in sorted(draw(PODS)))
    return Claim(ref(name), tuple(dict.fromkeys(allocations)), tuple(configs), pods)


class AnyOrder(RuleBasedStateMachine):
    @initialize(profile=PROFILES, first=st.lists(allocated_claims(), max_size=4))
    def begin(self, profile, first):
        self.directory = tempfile.mkdtemp(prefix="dra")
        self.world = World(self.directory)
        self.world.profile = profile
        for claim in first:
            self.prepare(claim, None)

    @rule(claim=allocated_claims(), after=FUSES)
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
        claim = self.world.api.claims[record.claim]
        joined = tuple(pod(each) for each in sorted(pods))
        changed = Claim(claim.ref, claim.allocations, claim.configs, joined)
        if not self.world.join(changed, after):
            # Whoever notes it looks again and again.
            self.world.preparer.prepared_claims.note_pods(changed)
            self.world.settle()

    @precondition(lambda self: any(record.pods for record in self.world.ledger.records()))
    @rule(data=st.data())
    def a_process_begins(self, data):
        records = [record for record in self.world.ledger.records() if record.pods]
        record = data.draw(st.sampled_from(records))
        used = self.world.users.alive.setdefault(record.claim.uid, set())
        used.add(data.draw(st.sampled_from(record.pods)))

    @precondition(lambda self: self.world.users.alive)
    @rule()
    def every_process_ends(self):
        self.world.users.alive.clear()

    @rule(profile=PROFILES)
    def change_profile(self, profile):
        self.world.profile = profile

    @rule()
    def restart(self):
        self.world.restart()

    @precondition(lambda self: self.world.node.agent)
    @rule()
    def the_agent_goes_down(self):
        self.world.node.agent = False

    @precondition(lambda self: not self.world.node.agent)
    @rule(knows=st.booleans())
    def the_agent_comes_back(self, knows):
        self.world.node.agent = True
        if not knows:
            self.world.node.namespaces.clear()
        self.world.look_after_namespaces()

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
    def what_a_process_uses_stays_as_it_is(self):
        if hasattr(self, "world"):
            for uid, pods in self.world.users.alive.items():
                record = self.world.ledger.known(uid)
                assert record is not None
                assert record.completed
                assert pods <= set(record.pods), "their limits hold (see above)"

    @invariant()
    def every_interval_is_the_one_asked_for_or_the_one_found(self):
        asked = {}
        uuids = {str(gpu.name): gpu.uuid for gpu in inventory(2).gpus}
        for claim in (self.world.api.claims[record.claim] for record in self.records()):
            for device in (result for result in claim.allocations if not result.admin):
                configs = [config for config in claim.configs if config.concerns(device.request)]
                sharing = configs[-1].parameters["sharing"] if configs else {}
                if interval := sharing.get("timeSlicingConfig", {}).get("interval"):
                    assert asked.setdefault(uuids[device.device], interval) == interval
        for (gpu, now), previous in zip(self.node().intervals.items(), FOUND, strict=True):
            assert str(now) == asked.get(gpu, str(previous))

    @invariant()
    def every_namespace_is_served_and_no_other(self):
        if hasattr(self, "world"):
            expected, served = self.world.namespaces(), self.node().namespaces
            assert expected.items() <= served.items()
            assert expected == served or not self.node().agent

    @invariant()
    def no_namespace_has_more_than_was_granted(self):
        reserved = defaultdict(int)
        for record in self.records():
            namespaces = record.namespaces
            for gpu in {gpu for namespace in namespaces for gpu in namespace.gpus}:
                held = [h for h in record.holdings if h.gpu == gpu and not h.admin]
                amounts = [requested_amount(holding.consumed, holding.shape) for holding in held]
                here = [namespace for namespace in namespaces if gpu in namespace.gpus]
                if not any(amount.whole for amount in amounts):
                    sizes = [
                        namespace.memory_bytes[namespace.gpus.index(gpu)] or TOTAL
                        for namespace in here
                    ]
                    assert sum(sizes) <= sum(amount.memory_bytes for amount in amounts)
                if all(amount.cores for amount in amounts):
                    cores = sum(amount.cores for amount in amounts)
                    assert sum(namespace.percent for namespace in here) <= cores
                    reserved[gpu] += cores
        assert all(cores <= 100 for cores in reserved.values())

    @invariant()
    def a_compute_mode_is_one_servers_alone_or_bars_nobody(self):
        changed = {step.gpu for step in self.steps(SetComputeMode)}
        for (gpu, now), previous in zip(self.node().modes.items(), FOUND_MODES, strict=True):
            if gpu not in changed:
                assert now == previous
            elif now is not ComputeMode.DEFAULT:
                assert now is ComputeMode.EXCLUSIVE_PROCESS
                self.assert_nobody_is_barred(gpu)

    def assert_nobody_is_barred(self, gpu):
        here = [r for r in self.records() if any(h.gpu == gpu and not h.admin for h in r.holdings)]
        gpus_by_record = [[namespace.gpus for namespace in record.namespaces] for record in here]
        servers = [
            {gpus for gpus in gpus_of_record if gpu in gpus} for gpus_of_record in gpus_by_record
        ]
        assert all(servers), "nobody who takes turns is barred"
        assert len(set().union(*servers)) == 1, "no second server is barred"

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
        self.world.users.alive.clear()
        for name in "abcdef":
            self.world.unprepare(name)
        self.node().agent = True
        self.world.look_after_namespaces()
        assert self.node().namespaces == {}
        assert tuple(self.node().modes.values()) == FOUND_MODES
        assert self.world.ledger.records() == ()
        assert not self.world.files.claims()
        assert self.node().limits == {}
        assert tuple(self.node().intervals.values()) == FOUND

    def records(self):
        return self.world.ledger.records() if hasattr(self, "world") else ()

    def holdings(self):
        return [h for record in self.records() for h in record.holdings if not h.admin]

    def steps(self, kind):
        return [s for record in self.records() for s in record.steps if isinstance(s, kind)]

    def node(self):
        return self.world.node


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=80,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def part(name, memory="20Gi", pods=(), **fields):
    return Claim(ref(name), (fraction(memory, **fields),), pods=tuple(pod(p) for p in pods))


@pytest.mark.parametrize("killed", ["prepare", "unprepare"])
def test_killed_before_any_effect_of_a_fraction_the_next_start_finds_all_or_nothing(world, killed):
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
    asked = Claim(ref("a"), (fraction(),), (config(sharing=sharing),), (pod("p"),))
    for after in itertools.count():
        if killed == "prepare":
            done = world.prepare(asked, after)
        else:
            assert world.prepare(asked)
            done = world.unprepare("a", after)
        prepared = world.ledger.known(ClaimUid("uid-a")) is not None
        interval = world.node.intervals[gpu_uuid()]
        assert bool(world.node.limits) == bool(world.specs.claims()) == prepared
        assert (interval == TimeSliceInterval.SHORT) == prepared
        if done:
            break
        world.unprepare("a")
    assert after >= {"prepare": 6, "unprepare": 4}[killed]


BOTH_GPUS_BY_MPS = Claim(
    ref("a"),
    (allocation("gpu-0", "r0"), allocation("gpu-1", "r1")),
    (config(sharing={"strategy": "MPS"}),),
    (pod("p"),),
)


@pytest.mark.parametrize("agent", [True, False], ids=["agent there", "agent down at the end"])
def test_killed_before_any_effect_of_mps_nothing_of_it_is_left(world, agent):
    for after in itertools.count():
        done = world.prepare(BOTH_GPUS_BY_MPS, after)
        prepared = world.ledger.known(ClaimUid("uid-a")) is not None
        assert bool(world.node.namespaces) == bool(world.specs.claims()) == prepared
        assert (ComputeMode.EXCLUSIVE_PROCESS in world.node.modes.values()) == prepared
        world.node.agent = agent
        world.unprepare("a", after)
        world.unprepare("a")
        world.node.agent = True
        world.look_after_namespaces()
        assert world.node.namespaces == {}
        assert tuple(world.node.modes.values()) == FOUND_MODES
        if done:
            break
    assert after >= 7


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

    assert world.preparer.prepared_claims.note_pods(part("a", pods="q"))
    limited = {uid for uid, _ in world.node.limits}
    assert limited == {"uid-p", "uid-q"}, "its containers may run: it was deleted by force"

    world.settle()
    assert {uid for uid, _ in world.node.limits} == {"uid-q"}


def test_the_limit_of_a_pod_is_the_sum_of_its_claims(world):
    world.prepare(part("a", "20Gi", pods="p"))
    world.prepare(part("b", "10Gi", pods="p"))
    assert set(world.node.limits.values()) == {30 * GIB}

    world.unprepare("a")

    assert set(world.node.limits.values()) == {10 * GIB}


def test_nobody_is_told_of_pods_of_a_claim_that_is_not_prepared(world):
    assert not world.preparer.prepared_claims.note_pods(part("a", pods="p"))
