"""Claims whose MIG instance somebody removed: their pods are told, once, and nobody else's."""

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.base.errors import MigInstanceNotFound, NodeError
from dra_driver.model.gpus import GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.dependencies import PrepareDependencies
from dra_driver.plugin.claims.prepared_claims import CallTimeouts, ClaimLocks, PreparedClaims
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.lost_instances import LostInstances
from tests import builders
from tests.builders import ref
from tests.fakes.preparers import free_lease
from tests.plan.mig.boards import instance, mig, mig_gpu

A, B = ref("a"), ref("b")
FIRST, SECOND = instance(mig(), "1g.5gb", 0), instance(mig(), "2g.10gb", 2)
DEVICES = {FIRST: "gpu-0-mig-1g5gb-19-0", SECOND: "gpu-0-mig-2g10gb-14-2"}
SILENT = NodeError("the GPU does not answer")


def record(claim=A, *pods, of: MigInstance = FIRST, **fields):
    """Of a claim that was prepared with this instance, which was created for it."""
    on_instance = {"partition": of.key, "created_for_claims": True, "instance": of}
    holding = builders.holding(claim, DEVICES[of], gpu=mig_gpu().uuid, **on_instance | fields)
    return builders.record(claim, holding, pods=pods or ("web",))


WHOLE = builders.record(A, builders.holding(A, gpu=mig_gpu().uuid), pods=("web",))


class World:
    """A GPU in MIG mode, claims on it, and who looks for their instances."""

    def __init__(self):
        self.instances = [FIRST, SECOND]
        self.halves: list[PartitionKey] = []  # instances without a compute instance
        self.last_look: tuple[MigInstance, ...] = (FIRST, SECOND)
        self.is_known = True  # whether the last look could tell the instances
        self.error: NodeError | None = None  # of a GPU that is asked
        self.stored: tuple[ClaimRecord, ...] = ()
        self.disk: NodeError | None = None  # why nothing can be written
        self.busy = False  # somebody else is giving the claim back
        self.gives_back = False  # somebody else does so before we can look
        self.questions = 0
        self.events = []
        self.metrics = Metrics()
        node: Any = self  # and all else that it needs
        self.watch = LostInstances(node, self.records, node, node, self.metrics)

    def inventory(self):
        gpu = mig_gpu(on=True, instances=self.last_look)
        return Inventory((gpu if self.is_known else replace(gpu, mig=None),))

    def instance(self, gpu, key):
        assert gpu == mig_gpu().uuid
        self.questions += 1
        if self.error:
            raise self.error
        for candidate in self.instances:
            if candidate.key == key:
                return candidate
        raise MigInstanceNotFound(f"there is no instance of {key}")

    def partitions(self, gpu):
        assert gpu == mig_gpu().uuid
        return (*(candidate.key for candidate in self.instances), *self.halves)

    def records(self):
        return self.stored

    def while_prepared(self, uid, act):
        if self.busy:
            raise NodeError("the claim is still being worked on")
        if self.gives_back:
            self.stored = ()
        if any(stored.claim.uid == uid and stored.completed for stored in self.stored):
            after = tuple(
                act(stored) if stored.claim.uid == uid else stored for stored in self.stored
            )
            if self.disk:
                raise self.disk
            self.stored = after

    def emit(self, event):
        self.events.append(event)

    def look(self, times=1):
        """The pods that were told until now."""
        self.last_look = tuple(self.instances)
        for _ in range(times):
            self.watch.look()
        assert {event.reason for event in self.events} <= {"MIGInstanceGone"}
        return [event.regarding.name for event in self.events]

    @property
    def number(self):
        return self.metrics.registry.get_sample_value("dra_driver_mig_lost_instances")

    @property
    def is_still_ours(self):
        """Of the first claim: whether its instance is to be removed with it."""
        return self.stored[0].holdings[0].created_for_claims


@pytest.fixture
def world():
    return World()


@pytest.fixture
def lost(world):
    """A claim has lost its instance, and nobody has looked yet."""
    world.stored, world.instances = (record(),), []
    return world


@pytest.mark.parametrize(
    "now",
    [
        pytest.param([SECOND], id="nothing"),
        pytest.param([replace(FIRST, uuid=GpuUuid("MIG-9")), SECOND], id="another in its place"),
    ],
)
def test_each_pod_of_a_claim_whose_instance_is_gone_is_told_once(world, caplog, now):
    world.stored = (record(A, "web", "db"), record(B, of=SECOND))
    assert (world.look(), world.number) == ([], 0)
    world.instances = now

    assert world.look(3) == ["web", "db"]
    assert world.number == 1
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("ERROR", "the MIG instance of a claim is gone")
    ]
    message = world.events[0].message
    assert message.startswith("gpu-0-mig-1g5gb-19-0 (MIG-19-0) is not there any more")
    assert "Claim default/a has nothing to compute on; delete the pod" in message
    gone, present = (stored.holdings[0] for stored in world.stored)
    assert (gone.instance, gone.created_for_claims, present.created_for_claims) == (
        FIRST,
        False,
        True,
    ), "it is held, and given up"


def test_a_claim_under_mps_is_told_what_becomes_of_its_server(lost):
    namespace = MpsNamespace(MpsNamespaceName("s"), A.uid, (FIRST.uuid,))
    lost.stored = (replace(record(), steps=(ServeMpsNamespace(namespace),)),)
    lost.look()

    assert "nothing to compute on, and its MPS server is ended; delete" in lost.events[0].message


def test_as_long_as_no_instance_is_missing_no_gpu_is_asked(world):
    world.stored = (record(), replace(WHOLE, claim=B))
    world.look(5)

    assert world.questions == 0


def test_a_pod_that_joins_the_claim_later_is_told_too(lost):
    lost.look()
    lost.stored = (record(A, "web", "db"),)

    assert lost.look(2) == ["web", "db"]


def test_an_instance_that_was_created_since_the_look_is_not_lost(world):
    world.stored, world.last_look = (record(),), ()
    world.watch.look()

    assert (world.events, world.questions, world.number) == ([], 1, 0)


def test_a_claim_that_is_just_given_back_has_lost_nothing(lost):
    lost.busy = True
    assert lost.look() == []

    lost.busy, lost.gives_back = False, True
    assert lost.look() == []


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(replace(record(), prepared=None, spec=None), id="not prepared yet"),
        pytest.param(WHOLE, id="of a GPU as a whole"),
        pytest.param(record(admin=True), id="admin access"),
    ],
)
def test_claims_that_compute_on_no_partition_are_left_alone(lost, stored):
    lost.stored = (stored,)

    assert (lost.look(), lost.questions) == ([], 0)


def test_a_gpu_that_does_not_answer_has_lost_nothing_new(lost):
    lost.error = SILENT
    assert lost.look() == []

    lost.error = None
    assert lost.look() == ["web"]
    lost.error = SILENT
    assert (lost.look(2), lost.number) == (["web"], 1)


def test_of_a_gpu_that_does_not_tell_its_instances_nothing_is_known(lost):
    lost.is_known = False

    assert (lost.look(), lost.questions) == ([], 0)


def test_an_instance_that_comes_back_and_goes_again_is_told_of_again(world):
    world.stored = (record(),)
    for _ in range(2):
        world.instances = []
        world.look()
        world.instances = [FIRST]
        world.look()

    assert (len(world.events), world.number) == (2, 0)


def test_half_an_instance_stays_to_be_removed(lost):
    """The pods are told: nothing computes on it."""
    lost.halves = [FIRST.key]

    assert lost.look(2) == ["web"]
    assert lost.is_still_ours

    lost.halves = []
    assert lost.look(2) == ["web"]
    assert not lost.is_still_ours


def test_pods_are_told_also_while_the_disk_takes_nothing(lost):
    lost.disk = NodeError("no space left on device")

    assert lost.look(2) == ["web"]
    assert lost.is_still_ours
    lost.disk = None
    assert lost.look() == ["web"]
    assert not lost.is_still_ours


def test_with_the_last_claim_nothing_is_lost_any_more(lost):
    lost.look()
    lost.stored = ()
    lost.look()

    assert lost.number == 0


def test_a_claim_is_asked_about_while_it_is_prepared_and_nobody_else_works_on_it(tmp_path):
    locks, records = ClaimLocks(), []
    ledger = Ledger(tmp_path / "claims", "boot")
    ledger.reload()
    untouched: Any = object()
    parts = (untouched, untouched, untouched, untouched, ledger, untouched)
    dependencies = PrepareDependencies(*parts, free_lease, untouched, untouched)
    prepared_claims = PreparedClaims(dependencies, locks, CallTimeouts(all=0.05))
    ledger.write(record())
    ledger.write(replace(record(B, of=SECOND), prepared=None, spec=None))

    def act(current):
        records.append(current)
        return replace(current, pods=(builders.pod("db"),))

    for claim in (A, B, ref("unknown")):
        prepared_claims.while_prepared(claim.uid, act)
    assert [current.claim for current in records] == [A]
    assert ledger.record(A.uid) == record(A, "db"), "the answer is recorded"

    with locks.claims.hold([A.uid], 1.0), pytest.raises(NodeError, match="worked on"):
        prepared_claims.while_prepared(A.uid, act)
    with locks.gpus.hold(record().gpus, 1.0), pytest.raises(NodeError, match="GPU-"):
        prepared_claims.while_prepared(A.uid, act)
    assert len(records) == 1
