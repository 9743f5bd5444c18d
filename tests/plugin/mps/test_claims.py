"""Claims by MPS, from request to CDI file and back, with an agent that is down at times."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dra_driver.base.errors import ClaimError, DriverError, MpsAgentUnreachable, NodeError
from dra_driver.k8s.claims import Claim, ClaimUid, PodUid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.profiles import (
    GpuSelector,
    MpsTenants,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.model.steps import (
    ComputeMode,
    RemoveMpsNamespace,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
)
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from tests.builders import allocation, config, fraction, gpu, inventory, pod, ref
from tests.fakes.node import FakeNode
from tests.fakes.pods import FakePods, container, pod_spec
from tests.fakes.preparers import ClaimWorld

MPS = config(sharing={"strategy": "MPS"})
FOUND = ComputeMode.PROHIBITED
ALONE = ComputeMode.EXCLUSIVE_PROCESS
NON_ROOT = Profile(
    "non-root", (ProfileEntry(GpuSelector(), Rules(tenants=MpsTenants.NON_ROOT), "spec.gpus[0]"),)
)


def claim_of(*allocations, name="claim", pods="", configs=(MPS,)):
    """A claim that these pods use; its configuration says MPS unless the test says otherwise."""
    return Claim(ref(name), allocations, configs, tuple(map(pod, pods)))


def whole(name="claim", device="gpu-0", **fields):
    return claim_of(allocation(device), name=name, **fields)


def part(name="claim", device="gpu-0", **fields):
    return claim_of(fraction("20Gi", device, cores="30"), name=name, configs=(), **fields)


def turns(name, device="gpu-0", memory="20Gi", **fields):
    """A claim without MPS."""
    return claim_of(fraction(memory, device), name=name, configs=(), **fields)


def two_fractions(**fields):
    return claim_of(fraction("10Gi", "gpu-0", "a"), fraction("10Gi", "gpu-1", "b"), **fields)


def two_requests(**fields):
    return claim_of(allocation("gpu-0", "a"), allocation("gpu-1", "b"), **fields)


class World(ClaimWorld):
    """A node with its disk, its MPS agent, and the claims and pods of an API server."""

    def __init__(self, directory):
        node = FakeNode(inventory(2))
        node.modes = dict.fromkeys(node.modes, FOUND)
        super().__init__(directory, node, CallTimeouts(all=5, hand_over=0))
        self.pods = FakePods()
        self.restart()

    def run(self, *pods):
        self.pods.pods |= {(pod.namespace, pod.name): pod for pod in pods}

    def prepare(self, claim):
        return self.preparer.prepare(self.api.put(claim))

    def environment(self, name="claim"):
        """What the containers find that have the first device of the claim."""
        env = self.spec(name)["devices"][0]["containerEdits"]["env"]
        return dict(line.split("=", 1) for line in env)

    @property
    def served(self):
        return {namespace.claim for namespace in self.node.namespaces.values()}

    def assert_nothing_is_left(self):
        assert self.nothing_left
        assert self.node.namespaces == {}
        assert self.node.limits == {}
        assert set(self.node.modes.values()) == {FOUND}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def kinds(steps):
    return [type(step) for step in steps]


def test_the_compute_mode_is_set_before_the_server_is_there_and_restored_when_it_is_gone(world):
    world.prepare(whole())

    assert kinds(world.node.done) == [SetComputeMode, ServeMpsNamespace]
    assert world.node.modes[gpu(0).uuid] is ALONE

    world.preparer.unprepare(ref())

    assert kinds(world.node.undone) == [RemoveMpsNamespace, SetComputeMode]
    world.assert_nothing_is_left()


def test_the_namespace_is_ended_before_the_memory_limit_of_its_pods(world):
    world.prepare(part(pods="p"))
    world.preparer.unprepare(ref())

    assert kinds(world.node.undone) == [RemoveMpsNamespace, SetMemoryLimits]


def test_a_container_is_told_the_way_to_its_own_namespace_and_its_limits(world):
    world.prepare(part())

    (namespace,) = world.node.namespaces.values()
    variables = world.environment()
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == f"/run/mps/{namespace.name}"
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"


def test_a_prepared_claim_is_answered_without_the_agent(world):
    first = world.prepare(part())
    world.node.agent = False

    assert world.prepare(part()) == first
    world.restart()
    assert world.prepare(part()) == first


def test_an_agent_that_is_down_is_said_and_the_claim_is_served_once_it_is_back(world):
    world.node.agent = False

    for claim in (part(pods="p"), whole()):
        with pytest.raises(MpsAgentUnreachable, match="MPS agent of this node does not answer"):
            world.prepare(claim)
        world.assert_nothing_is_left()

    world.node.agent = True
    assert world.prepare(part())
    assert world.served == {"uid-claim"}


def test_an_agent_that_is_down_is_nothing_to_claims_without_mps(world):
    world.node.agent = False

    assert world.prepare(turns("claim"))


def test_an_agent_that_is_down_does_not_keep_a_pod_from_ending(world):
    world.prepare(whole())
    (namespace,) = world.node.namespaces.values()
    world.node.agent = False

    world.preparer.unprepare(ref())

    assert world.ledger.records() == ()
    assert world.node.modes[gpu(0).uuid] is FOUND
    assert world.node.namespaces, "nobody could end it"
    world.node.agent = True
    world.preparer.prepared_claims.end_unknown(namespace)
    world.assert_nothing_is_left()


def test_a_namespace_with_other_limits_is_said_and_everything_is_undone(world):
    world.prepare(whole())
    (namespace,) = world.node.namespaces.values()
    world.preparer.unprepare(ref())
    world.node.namespaces[namespace.name] = replace(namespace, percent=1)

    with pytest.raises(
        NodeError, match=f"namespace {namespace.name} exists already with other limits"
    ):
        world.prepare(whole())

    world.assert_nothing_is_left()
    assert world.prepare(whole()), "what was in the way is ended with what failed"


def test_a_claim_allocated_anew_is_served_though_the_agent_still_has_what_it_was(world):
    world.prepare(part(device="gpu-0"))
    (before,) = world.node.namespaces.values()
    world.node.agent = False
    world.preparer.unprepare(ref())
    world.node.agent = True

    world.prepare(part(device="gpu-1"))
    world.preparer.prepared_claims.end_unknown(before)

    assert [namespace.gpus for namespace in world.node.namespaces.values()] == [(gpu(1).uuid,)]


def test_of_two_servers_one_of_which_does_not_start_none_is_left_and_the_first_error_is_told(world):
    world.run(pod_spec("p", container("x", ("claim", "a")), container("y", ("claim", "b"))))

    def refuse(step):
        if isinstance(step, ServeMpsNamespace) and gpu(1).uuid in step.namespace.gpus:
            world.node.undo_fails = True
            raise NodeError("the daemon died: its log's last lines")

    world.node.before_step = refuse
    with pytest.raises(NodeError, match="its log's last lines"):
        world.prepare(two_requests(pods="p"))
    assert not world.ledger.records()[0].completed, "it could not be undone either"

    world.node.before_step, world.node.undo_fails = lambda step: None, False
    world.restart()
    world.assert_nothing_is_left()


def test_two_containers_of_one_pod_with_a_request_each_have_servers_of_their_own(world):
    world.run(pod_spec("p", container("x", ("claim", "a")), container("y", ("claim", "b"))))

    world.prepare(two_requests(pods="p"))

    assert len(world.node.namespaces) == 2
    world.preparer.unprepare(ref())
    world.assert_nothing_is_left()


def test_pods_are_read_only_where_what_a_claim_gets_depends_on_them(world):
    world.run(pod_spec("p", container("x", ("claim", ""))))

    for claim in (whole(pods="p"), part(pods="p"), two_requests(configs=())):
        world.prepare(claim)
        world.preparer.unprepare(ref())
    assert world.pods.read_names == []

    world.prepare(two_requests(pods="p"))
    assert world.pods.read_names == ["p"]
    world.preparer.unprepare(ref())

    world.profile = NON_ROOT
    with pytest.raises(ClaimError, match="container 'x' can run as root"):
        world.prepare(part(pods="p"))
    world.assert_nothing_is_left()


def test_pods_that_may_not_be_read_are_named_with_the_claim_that_needs_it(world):
    world.pods.allowed = False

    with pytest.raises(NodeError) as refused:
        world.prepare(two_requests(pods="p"))

    assert str(refused.value) == (
        "claim default/claim: which container of pod p uses what cannot be read, and has to be "
        "known (it is shared by MPS): pods may not be read"
    )
    world.assert_nothing_is_left()
    assert world.prepare(part(pods="p")), "it does not depend on the pod"


def test_pods_that_cannot_be_read_are_not_waited_for_one_after_the_other(world):
    """Each may take the whole deadline of a read."""
    world.pods.allowed = False

    with pytest.raises(NodeError, match="has to be known"):
        world.prepare(two_requests(pods=[f"p-{number}" for number in range(100)]))

    assert len(world.pods.read_names) <= 8, "no more than are read at once"


def test_pods_that_are_gone_and_others_of_their_name_need_nothing(world):
    both = container("x", ("claim", ""))
    world.run(pod_spec("o"), replace(pod_spec("q", both), uid=PodUid("another one")))

    world.prepare(two_requests(pods="opq"))

    assert sorted(world.pods.read_names) == ["o", "p", "q"]
    assert len(world.node.namespaces) == 2


def test_the_pods_of_a_claim_are_read_side_by_side(world):
    together = threading.Barrier(3)
    read = world.pods.read

    def read_together(namespace, name):
        together.wait(30)
        return read(namespace, name)

    world.pods.read = read_together
    world.run(*(pod_spec(name, container("x", ("claim", ""))) for name in "opq"))

    world.prepare(two_requests(pods="opq"))

    assert sorted(world.pods.read_names) == ["o", "p", "q"]


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(two_fractions(pods="p"), id="what it gets depends on them"),
        pytest.param(part(pods="p"), id="another claim is on a server"),
    ],
)
def test_while_pods_are_read_other_claims_get_the_same_gpu(world, claim):
    world.prepare(part("other", "gpu-1", pods="q"))
    world.run(pod_spec("p", container("x", ("claim", ""))))
    read, beside = world.pods.read, []

    def read_meanwhile(namespace, name):
        world.pods.read = read
        beside.append(world.prepare(turns("beside", memory="1Gi")))
        return read(namespace, name)

    world.pods.read = read_meanwhile

    world.prepare(claim)

    assert beside
    assert len(world.ledger.records()) == 3


def test_several_requests_wait_for_a_pod_that_is_there(world):
    for pods in ("p", ""):
        with pytest.raises(
            ClaimError, match=r"requests a, b .* is reserved for no pod that is there"
        ):
            world.prepare(two_requests(pods=pods))
        world.assert_nothing_is_left()


def test_a_claim_that_was_prepared_for_another_pod_is_seen_all_the_same(world):
    world.run(
        pod_spec("q", container("x", ("a", ""))),
        pod_spec("p", container("x", ("a", ""), ("b", ""))),
    )
    world.prepare(part("a", pods="q"))  # p has come since

    with pytest.raises(ClaimError, match=r"claim default/b: pod default/p, .* uses claim a too"):
        world.prepare(part("b", "gpu-1", pods="p"))

    assert world.served == {"uid-a"}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (part, part, r"claim default/b: pod default/p, .* uses claim a too"),
        (turns, whole, "a program under MPS sees no other GPU"),
        (whole, turns, "a program under MPS sees no other GPU"),
    ],
    ids=["two by MPS", "the second by MPS", "the first by MPS"],
)
def test_what_one_container_cannot_use_together_is_refused_and_the_first_stays(
    world, first, second, message
):
    world.run(pod_spec("p", container("x", ("a", ""), ("b", ""))))
    world.prepare(first("a", pods="p"))

    with pytest.raises(ClaimError, match=message):
        world.prepare(second("b", "gpu-1", pods="p"))

    assert [record.claim.name for record in world.ledger.records()] == ["a"]
    assert world.served == (set() if first is turns else {"uid-a"})


@pytest.mark.parametrize("first", [turns, part])
def test_two_claims_of_one_pod_go_together_in_different_containers(world, first):
    world.run(pod_spec("p", container("x", ("a", "")), container("y", ("b", ""))))

    world.prepare(first("a", pods="p"))
    world.prepare(part("b", "gpu-1", pods="p"))

    assert world.served == {"uid-b"} | ({"uid-a"} if first is part else set())


def test_pods_are_read_for_claims_without_mps_only_beside_claims_with_it(world):
    world.run(pod_spec("p", container("x", ("a", ""))), pod_spec("q", container("x", ("b", ""))))

    world.prepare(turns("a", pods="p"))
    world.prepare(turns("b", pods="q"))
    elsewhere = replace(ref("far"), namespace="else")
    world.prepare(replace(part("far", "gpu-1", pods="q"), ref=elsewhere))
    world.prepare(turns("c", pods="q", memory="1Gi"))
    world.prepare(claim_of(allocation("gpu-0", admin=True), name="d", pods="p", configs=()))
    assert world.pods.read_names == []

    world.prepare(part("e", "gpu-1", pods="p"))
    world.prepare(turns("f", pods="q", memory="1Gi"))
    assert world.pods.read_names == ["p", "q"]


def test_beside_a_claim_under_mps_another_is_planned_once_and_with_its_pods(world):
    world.run(pod_spec("p", container("x", ("b", ""))))
    world.prepare(part("a"))
    leases = []

    @contextmanager
    def lease(seconds):
        leases.append(list(world.pods.read_names))
        yield

    world.preparer = world.preparer_with(lease=lease)
    world.prepare(part("b", pods="p"))

    assert leases == [["p"]]


def test_beside_claims_under_mps_no_pods_are_read_for_what_does_not_depend_on_them(world):
    prepared = part("a", pods="p")
    world.prepare(prepared)
    world.prepare(part("b", "gpu-1"))
    world.pods.allowed = False

    assert world.prepare(prepared)
    assert world.prepare(claim_of(allocation("gpu-0", admin=True), name="d", pods="p", configs=()))


def test_a_claim_without_mps_whose_pod_may_not_be_read_is_told_why_it_has_to_be(world):
    world.prepare(part("a"))
    world.pods.allowed = False

    with pytest.raises(NodeError, match="it or a claim of its namespace is shared by MPS"):
        world.prepare(turns("b", pods="p"))

    assert world.served == {"uid-a"}


class MeetingLedger(Ledger):
    """Two claims come to their first record together, and go on from it together."""

    def __init__(self, *args):
        super().__init__(*args)
        self.both = threading.Barrier(2, timeout=30)
        self.met = set()

    def write(self, record):
        is_first = record.claim not in self.met
        self.met.add(record.claim)
        if is_first:
            self.both.wait()
        super().write(record)
        if is_first:
            self.both.wait()


def test_two_claims_of_one_container_are_refused_also_when_they_are_prepared_at_once(world):
    world.run(pod_spec("p", container("x", ("a", ""), ("b", ""))))
    world.ledger_type = MeetingLedger
    world.restart()
    refused = []

    def prepare(claim):
        try:
            world.prepare(claim)
        except ClaimError as e:
            refused.append(str(e))

    claims = (part("a", "gpu-0", pods="p"), part("b", "gpu-1", pods="p"))
    threads = [threading.Thread(target=prepare, args=[claim]) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    recorded = [str(record.claim) for record in world.ledger.records()]
    gone = [message.removeprefix("claim ").partition(": ")[0] for message in refused]
    assert gone, "one at least sees the other"
    assert sorted(recorded + gone) == ["default/a", "default/b"]
    assert len(world.served) == len(recorded)


def test_what_the_agent_does_not_know_any_more_is_served_again_as_it_was(world):
    world.prepare(part())
    before = dict(world.node.namespaces)
    world.node.namespaces.clear()

    world.preparer.prepared_claims.serve_again(ClaimUid("uid-claim"))

    assert world.node.namespaces == before


def test_nothing_is_served_again_of_a_claim_that_is_not_prepared(world):
    world.preparer.prepared_claims.serve_again(ClaimUid("uid-unknown"))
    world.prepare(part())
    (record,) = world.ledger.records()
    world.preparer.unprepare(ref())
    world.ledger.write(replace(record, prepared=None))

    world.preparer.prepared_claims.serve_again(ClaimUid("uid-claim"))

    assert world.node.namespaces == {}


def test_a_namespace_of_a_claim_is_not_ended_as_unknown_and_one_of_none_is(world):
    world.prepare(part())
    (known,) = world.node.namespaces.values()
    others = (
        MpsNamespace(MpsNamespaceName("c_gone"), ClaimUid("uid-gone"), (gpu(0).uuid,)),
        replace(known, name=MpsNamespaceName("c_before")),  # of the same claim, allocated otherwise
    )
    world.node.namespaces |= {other.name: other for other in others}

    for namespace in (known, *others):
        world.preparer.prepared_claims.end_unknown(namespace)

    assert world.node.namespaces == {known.name: known}


def test_a_namespace_is_not_ended_as_unknown_while_its_claim_is_being_prepared(world):
    ending = []

    def look(step):
        if isinstance(step, ServeMpsNamespace) and not ending:
            end = threading.Thread(
                target=world.preparer.prepared_claims.end_unknown, args=[step.namespace]
            )
            ending.append(end)
            end.start()
            end.join(0.2)
            assert end.is_alive()

    world.node.before_step = look
    world.prepare(part())
    ending[0].join(5)

    assert world.served == {"uid-claim"}


def test_a_pod_that_joins_leaves_the_namespace_as_it_is(world):
    world.prepare(whole(pods="p"))
    before = dict(world.node.namespaces)

    assert world.preparer.prepared_claims.note_pods(whole(pods="pq"))

    assert world.node.namespaces == before
    assert [pod.name for pod in world.ledger.records()[0].pods] == ["p", "q"]
    world.preparer.unprepare(ref())
    world.assert_nothing_is_left()


def test_a_gpu_that_a_server_has_alone_is_free_for_turns_once_that_is_gone(world):
    world.prepare(whole("a"))
    with pytest.raises(DriverError, match="held by claim default/a"):
        world.prepare(turns("b"))

    world.preparer.unprepare(ref("a"))

    assert world.prepare(turns("b"))
    assert world.node.modes[gpu(0).uuid] is FOUND


class Killed(BaseException):
    """kill -9: nobody catches it."""


@pytest.mark.parametrize("back", [True, False], ids=["agent there", "agent down"])
@pytest.mark.parametrize("at", [SetComputeMode, ServeMpsNamespace, None])
def test_killed_while_a_claim_by_mps_is_prepared_the_next_start_takes_it_back(world, at, back):
    def die(step):
        if isinstance(step, at or ()):
            raise Killed

    def die_at_last():
        if at is None:
            raise Killed

    world.node.before_step, world.node.before_files = die, die_at_last
    with pytest.raises(Killed):
        world.prepare(whole())
    world.node.before_step, world.node.before_files = lambda step: None, lambda: None

    world.node.agent = back
    world.restart()

    assert world.ledger.records() == ()
    world.node.agent = True
    for namespace in tuple(world.node.namespaces.values()):
        assert not back
        world.preparer.prepared_claims.end_unknown(namespace)
    world.assert_nothing_is_left()
