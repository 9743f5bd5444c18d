"""Claims whose MIG instance somebody removed: their pods are told, once, and nobody else's."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.base.errors import MigInstanceNotFound, NodeError
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.gpus import DeviceName, GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.dependencies import PrepareDependencies
from dra_driver.plugin.claims.prepared_claims import CallTimeouts, ClaimLocks, PreparedClaims
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.lost_instances import LostInstances
from tests.builders import ref
from tests.fakes.preparers import free_lease
from tests.plan.mig.boards import instance, mig, mig_gpu

A, B = ref("a"), ref("b")
WEB, DB = Pod("web", PodUid("uid-web")), Pod("db", PodUid("uid-db"))
MINE, OTHER = instance(mig(), "1g.5gb", 0), instance(mig(), "2g.10gb", 2)
DEVICES = {MINE: DeviceName("gpu-0-mig-1g5gb-19-0"), OTHER: DeviceName("gpu-0-mig-2g10gb-14-2")}


def record(claim=A, *pods, of: MigInstance | None = MINE, **fields):
    holding = Holding(claim, DeviceName("gpu-0"), gpu=mig_gpu().uuid)
    if of is not None:
        holding = replace(
            holding,
            device=DEVICES[of],
            partition=of.key,
            created_for_claims=True,
            instance=of,
            **fields,
        )
    return ClaimRecord(claim, (holding,), prepared=(), spec="{}", pods=pods or (WEB,))


class World:
    """A GPU in MIG mode, claims on it, and who looks for their instances."""

    def __init__(self):
        self.there = [MINE, OTHER]
        self.half: list[PartitionKey] = []  # instances without a compute instance
        self.seen: tuple[MigInstance, ...] = (MINE, OTHER)  # at the last look
        self.error: NodeError | None = None
        self.fails: NodeError | None = None
        self.known: tuple[ClaimRecord, ...] = ()
        self.disk: NodeError | None = None  # why nothing can be written
        self.busy = False  # somebody else is giving the claim back
        self.gives_back = False  # somebody else does so before we can look
        self.asked = 0
        self.events = []
        self.metrics = Metrics()
        node: Any = self  # and all else that it needs
        self.watch = LostInstances(node, self.records, node, node, self.metrics)

    def inventory(self):
        gpu = mig_gpu(on=True, pending=True, instances=self.seen)
        return Inventory((replace(gpu, mig=None) if self.error else gpu,))

    def instance(self, gpu, key):
        assert gpu == mig_gpu().uuid
        self.asked += 1
        if self.fails:
            raise self.fails
        for candidate in self.there:
            if candidate.key == key:
                return candidate
        raise MigInstanceNotFound(f"there is no instance of {key}")

    def partitions(self, gpu):
        assert gpu == mig_gpu().uuid
        return (*(candidate.key for candidate in self.there), *self.half)

    def records(self):
        return self.known

    def while_prepared(self, uid, act):
        if self.busy:
            raise NodeError("the claim is still being worked on")
        if self.gives_back:
            self.known = ()
        if any(record.claim.uid == uid and record.completed for record in self.known):
            after = tuple(act(o) if o.claim.uid == uid else o for o in self.known)
            if self.disk:
                raise self.disk
            self.known = after

    def emit(self, event):
        self.events.append(event)

    def look(self, times=1):
        self.seen = tuple(self.there)
        for _ in range(times):
            self.watch.look()
        return [(event.regarding.name, event.reason) for event in self.events]

    @property
    def number(self):
        return self.metrics.registry.get_sample_value("dra_driver_mig_lost_instances")


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize(
    "now",
    [
        pytest.param([OTHER], id="nothing"),
        pytest.param([replace(MINE, uuid=GpuUuid("MIG-9")), OTHER], id="another one in its place"),
    ],
)
def test_each_pod_of_a_claim_whose_instance_is_gone_is_told_once(world, caplog, now):
    world.known = (record(A, WEB, DB), record(B, of=OTHER))
    assert (world.look(), world.number) == ([], 0)
    world.there = now

    assert world.look(3) == [("web", "MIGInstanceGone"), ("db", "MIGInstanceGone")]
    assert world.number == 1
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("ERROR", "the MIG instance of a claim is gone")
    ]
    message = world.events[0].message
    assert message.startswith("gpu-0-mig-1g5gb-19-0 (MIG-19-0) is not there any more")
    assert "Claim default/a has nothing to compute on; delete the pod" in message


def test_a_claim_under_mps_is_told_what_becomes_of_its_server(world):
    namespace = MpsNamespace(MpsNamespaceName("s"), A.uid, (MINE.uuid,))
    world.known = (replace(record(), steps=(ServeMpsNamespace(namespace),)),)
    world.there = []
    world.look()

    assert "nothing to compute on, and its MPS server is ended; delete" in world.events[0].message


def test_as_long_as_everything_is_there_no_gpu_is_asked(world):
    world.known = (record(), record(B, of=None))
    world.look(5)

    assert world.asked == 0


def test_a_pod_that_joins_the_claim_later_is_told_too(world):
    world.known = (record(),)
    world.there = []
    world.look()
    world.known = (record(A, WEB, DB),)

    assert [pod for pod, _ in world.look(2)] == ["web", "db"]


def test_an_instance_that_was_cut_since_the_look_is_there(world):
    world.known = (record(),)
    world.seen = ()
    world.watch.look()

    assert (world.events, world.asked, world.number) == ([], 1, 0)


def test_a_claim_that_is_just_given_back_has_lost_nothing(world):
    world.known = (record(),)
    world.there = []
    world.busy = True
    assert world.look() == []

    world.busy = False
    world.gives_back = True
    assert world.look() == []


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(replace(record(), prepared=None, spec=None), id="not prepared yet"),
        pytest.param(record(of=None), id="of a GPU as a whole"),
        pytest.param(record(admin=True), id="looks on"),
    ],
)
def test_claims_that_compute_on_no_partition_are_left_alone(world, held):
    world.known = (held,)
    world.there = []

    assert (world.look(), world.asked) == ([], 0)


def test_a_gpu_that_does_not_answer_has_lost_nothing(world):
    world.known = (record(),)
    world.there = []
    world.fails = NodeError("the GPU does not answer")
    assert world.look() == []

    world.fails = None
    assert len(world.look()) == 1
    world.fails = NodeError("the GPU does not answer")
    assert (len(world.look(2)), world.number) == (1, 1)


def test_of_a_gpu_that_does_not_say_how_it_is_cut_nothing_is_known(world):
    world.known = (record(),)
    world.there = []
    world.error = NodeError("no geometry")

    assert (world.look(), world.asked) == ([], 0)


def test_an_instance_that_comes_back_and_goes_again_is_told_of_again(world):
    world.known = (record(),)
    for _ in range(2):
        world.there = []
        world.look()
        world.there = [MINE]
        world.look()

    assert (len(world.events), world.number) == (2, 0)


def test_what_is_gone_is_held_and_given_up(world):
    world.known = (record(A), record(B, of=OTHER))
    world.there = [OTHER]
    world.look()

    gone, there = (claim_record.holdings[0] for claim_record in world.known)
    assert (gone.instance, gone.created_for_claims, there.created_for_claims) == (MINE, False, True)


def test_what_is_half_gone_stays_to_be_removed(world):
    """The pods are told: nothing computes on it."""
    world.known = (record(),)
    world.there, world.half = [], [MINE.key]

    assert world.look(2) == [("web", "MIGInstanceGone")]
    assert world.known[0].holdings[0].created_for_claims

    world.half = []
    assert world.look(2) == [("web", "MIGInstanceGone")]
    assert not world.known[0].holdings[0].created_for_claims


def test_pods_are_told_also_while_the_disk_takes_nothing(world):
    world.known = (record(),)
    world.there = []
    world.disk = NodeError("no space left on device")

    assert world.look(2) == [("web", "MIGInstanceGone")]
    assert world.known[0].holdings[0].created_for_claims
    world.disk = None
    assert world.look() == [("web", "MIGInstanceGone")]
    assert not world.known[0].holdings[0].created_for_claims


def test_with_the_last_claim_nothing_is_gone_any_more(world):
    world.known = (record(),)
    world.there = []
    world.look()
    world.known = ()
    world.look()

    assert world.number == 0


class Nothing:
    """What a look for lost instances does not touch."""


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "claims", "boot")
    made.reload()
    return made


def open_prepared_claims(ledger, locks):
    nothing: Any = Nothing()
    dependencies = PrepareDependencies(
        *(nothing,) * 4, ledger, nothing, free_lease, lambda record: None, nothing
    )
    return PreparedClaims(dependencies, locks, CallTimeouts(all=0.05))


def test_a_claim_is_asked_about_while_it_is_prepared_and_nobody_else_works_on_it(ledger):
    locks, seen = ClaimLocks(), []
    prepared_claims = open_prepared_claims(ledger, locks)
    ledger.write(record())
    ledger.write(replace(record(B, of=OTHER), prepared=None, spec=None))

    def see(current):
        seen.append(current)
        return replace(current, pods=(DB,))

    for claim in (A, B, ref("unknown")):
        prepared_claims.while_prepared(claim.uid, see)
    assert [current.claim for current in seen] == [A]
    assert ledger.record(A.uid) == replace(record(), pods=(DB,)), "what is answered is recorded"

    with locks.claims.hold([A.uid], 1.0), pytest.raises(NodeError, match="worked on"):
        prepared_claims.while_prepared(A.uid, see)
    with locks.gpus.hold(record().gpus, 1.0), pytest.raises(NodeError, match="GPU-"):
        prepared_claims.while_prepared(A.uid, see)
    assert len(seen) == 1
