"""Claims that the kubelet forgot, and records that nobody can read, are put right in the end."""

from dataclasses import replace

import pytest

from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import DeviceHeldByClaim, Unreachable
from dra_driver.k8s.claims import Claim, ClaimUid
from dra_driver.model.gpus import DeviceName
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.ledger_files import encode_record
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from tests.builders import POOL, allocation, gpu_uuid, inventory, record, ref


class Api:
    """What the API server knows: the claims that exist."""

    def __init__(self, *existing):
        self.existing = set(existing)
        self.deallocated = set()
        self.allocations = {}
        self.down = False
        self.asked = []

    def exists(self, claim):
        if self.down:
            raise Unreachable("no answer")
        self.asked.append(claim.name)
        return claim in self.existing

    def is_deleted(self, claim):
        return claim not in self.existing | self.deallocated

    def find_by_uid(self, uid):
        if self.down:
            raise Unreachable("no answer")
        claim_ref = next((claim for claim in self.existing if claim.uid == uid), None)
        return Claim(claim_ref, (self.allocations.get(uid) or allocation(),)) if claim_ref else None


class Preparer:
    def __init__(self, ledger):
        self.ledger = ledger
        self.prepared = []

    def prepare(self, claim):
        self.prepared.append(claim)
        self.ledger.write(record(claim.name))
        return ()

    def take_back_if(self, claim, gone):
        if not gone():
            return False
        self.ledger.forget(claim.uid)
        return True


def opened(tmp_path):
    ledger = Ledger(tmp_path, "boot")
    ledger.reload()
    return ledger


@pytest.fixture
def ledger(tmp_path):
    return opened(tmp_path)


def reconciler_of(ledger, api, preparer):
    return ClaimReconciler(ledger, api, preparer, POOL, lambda: inventory().gpus)


def names(ledger):
    return [record.claim.name for record in ledger.records()]


def test_a_claim_that_exists_is_left_alone(ledger):
    ledger.write(record("a"))
    reconciler = reconciler_of(ledger, Api(ref("a")), Preparer(ledger))

    assert [reconciler.look() for _ in range(3)] == [0, 0, 0]
    assert names(ledger) == ["a"]


def test_a_completed_claim_that_is_gone_at_two_looks_is_taken_back(ledger):
    ledger.write(record("a"))
    ledger.write(record("b"))
    reconciler = reconciler_of(ledger, Api(ref("b")), Preparer(ledger))

    assert reconciler.look() == 0
    assert names(ledger) == ["a", "b"]
    assert reconciler.look() == 1
    assert names(ledger) == ["b"]


def test_one_look_in_between_at_which_it_existed_starts_anew(ledger):
    ledger.write(record("a"))
    api = Api()
    reconciler = reconciler_of(ledger, api, Preparer(ledger))
    reconciler.look()
    api.existing.add(ref("a"))
    reconciler.look()
    api.existing.clear()

    assert reconciler.look() == 0
    assert names(ledger) == ["a"]


@pytest.mark.point(50)
def test_an_api_server_that_does_not_answer_takes_nothing_back(ledger):
    ledger.write(record("a"))
    api = Api()
    api.down = True
    reconciler = reconciler_of(ledger, api, Preparer(ledger))

    assert [reconciler.look() for _ in range(3)] == [0, 0, 0]
    assert names(ledger) == ["a"]


def test_many_claims_are_looked_at_a_few_at_a_time_and_all_in_turn(ledger):
    everyone = [f"claim-{n:02}" for n in range(40)]
    for name in everyone:
        ledger.write(record(name))
    api = Api(*(ref(name) for name in everyone))
    reconciler = reconciler_of(ledger, api, Preparer(ledger))

    reconciler.look()
    assert len(api.asked) < len(everyone)
    reconciler.look()
    reconciler.look()

    assert set(api.asked) == set(everyone)


def set_aside(tmp_path, name):
    (tmp_path / "boot").mkdir(exist_ok=True)
    (tmp_path / "boot" / f"uid-{name}.json").write_bytes(b"?")


def test_a_claim_with_an_unreadable_record_is_prepared_again(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)
    preparer = Preparer(ledger)

    assert reconciler_of(ledger, Api(ref("a")), preparer).look() == 1
    assert preparer.prepared == [ref("a")]
    assert ledger.set_aside() == ()


def test_an_unreadable_record_of_a_claim_that_is_gone_is_forgotten(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)

    assert reconciler_of(ledger, Api(), Preparer(ledger)).look() == 1
    assert ledger.set_aside() == ()


def test_a_record_that_only_another_release_understands_stays_whatever_becomes_of_its_claim(
    tmp_path,
):
    theirs = encode_record(record("a")).replace(RELEASE.encode(), b"0.9.0")
    path = tmp_path / "boot/uid-a.json"
    path.parent.mkdir()
    path.write_bytes(theirs.replace(b'"Exclusive"', b'"Cube"'))
    ledger = opened(tmp_path)
    preparer = Preparer(ledger)

    elsewhere = Api(ref("a"))
    elsewhere.allocations[ref("a").uid] = allocation("gpu-1")
    for api in (Api(ref("a")), elsewhere, Api()):
        assert reconciler_of(ledger, api, preparer).look() == 0
    assert preparer.prepared == []
    (aside,) = ledger.set_aside()
    assert (aside.release, aside.names, aside.gpus) == ("0.9.0", {"gpu-0"}, {gpu_uuid(0)})

    path.write_bytes(theirs)
    assert opened(tmp_path).records() == (replace(record("a"), spec=None),)


def test_an_unreadable_record_waits_while_nothing_is_known_of_its_claim(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)
    api = Api()
    api.down = True

    assert reconciler_of(ledger, api, Preparer(ledger)).look() == 0
    assert [aside.uid for aside in ledger.set_aside()] == [ClaimUid("uid-a")]


@pytest.mark.point(53)
def test_a_claim_that_cannot_be_taken_back_is_tried_again(ledger):
    ledger.write(record("a"))

    class Stuck(Preparer):
        def take_back_if(self, claim, gone):
            raise DeviceHeldByClaim("busy")

    reconciler = reconciler_of(ledger, Api(), Stuck(ledger))

    assert [reconciler.look() for _ in range(3)] == [0, 0, 0]
    assert names(ledger) == ["a"]


def test_a_claim_allocated_anew_between_the_look_and_the_act_is_left_alone(ledger):
    ledger.write(record("a"))
    api = Api()
    api.deallocated.add(ref("a"))

    class Slow(Preparer):
        def take_back_if(self, claim, gone):
            api.existing.add(claim)  # while the reconciler waited for its turn
            return super().take_back_if(claim, gone)

    reconciler = reconciler_of(ledger, api, Slow(ledger))

    assert [reconciler.look() for _ in range(3)] == [0, 0, 0]
    assert names(ledger) == ["a"]


def test_nobody_is_asked_about_a_deleted_claim_while_others_wait_for_the_turn(ledger):
    ledger.write(record("a"))
    api = Api()

    class Waiting(Preparer):
        def take_back_if(self, claim, gone):
            before = list(api.asked)
            assert gone()
            assert api.asked == before
            return super().take_back_if(claim, gone)

    reconciler = reconciler_of(ledger, api, Waiting(ledger))

    assert [reconciler.look() for _ in range(2)] == [0, 1]


def test_two_records_that_say_nothing_do_not_stand_in_each_others_way(tmp_path):
    set_aside(tmp_path, "a")
    set_aside(tmp_path, "b")
    ledger = opened(tmp_path)
    api = Api(ref("a"), ref("b"))
    api.allocations[ClaimUid("uid-b")] = allocation("gpu-1")

    class Careful(Preparer):
        def prepare(self, claim):
            minor = 1 if claim == ref("b") else 0
            gpu = gpu_uuid(minor), DeviceName(f"gpu-{minor}")
            others = [aside for aside in ledger.set_aside() if aside.uid != claim.uid]
            assert not any(aside.may_hold(*gpu) for aside in others)
            return super().prepare(claim)

    assert reconciler_of(ledger, api, Careful(ledger)).look() == 2
    assert ledger.set_aside() == ()


def test_an_unreadable_record_of_a_claim_that_is_elsewhere_now_is_forgotten(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)
    api = Api(ref("a"))
    api.allocations[ClaimUid("uid-a")] = allocation(pool="another-node")

    assert reconciler_of(ledger, api, Preparer(ledger)).look() == 1
    assert ledger.set_aside() == ()


def test_an_unreadable_record_whose_claim_cannot_be_prepared_holds_only_its_own_gpu(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)

    class Stuck(Preparer):
        def prepare(self, claim):
            raise DeviceHeldByClaim("its GPU is gone")

    assert reconciler_of(ledger, Api(ref("a")), Stuck(ledger)).look() == 0
    (aside,) = ledger.set_aside()
    gpus = inventory(2).gpus
    assert [aside.may_hold(gpu.uuid, gpu.name) for gpu in gpus] == [True, False]


def test_an_unreadable_record_of_a_gpu_that_cannot_be_seen_holds_that_one_only(tmp_path):
    set_aside(tmp_path, "a")
    ledger = opened(tmp_path)
    api = Api(ref("a"))
    api.allocations[ClaimUid("uid-a")] = allocation("gpu-7")

    class Stuck(Preparer):
        def prepare(self, claim):
            raise DeviceHeldByClaim("its GPU is gone")

    assert reconciler_of(ledger, api, Stuck(ledger)).look() == 0
    (aside,) = ledger.set_aside()
    assert not any(aside.may_hold(gpu.uuid, gpu.name) for gpu in inventory().gpus)
    assert aside.may_hold(
        gpu_uuid(7), DeviceName("gpu-7")
    )  # which may be back before the next look
