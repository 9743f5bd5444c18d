"""One claim, from request to CDI file and back: record, act, record, and any crash in between."""

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cdi.registry import load_registry
from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import (
    ClaimError,
    ClaimInUse,
    DeviceHeldByClaim,
    NodeError,
    TimedOut,
    UnknownDevice,
)
from dra_driver.k8s.claims import Claim, ClaimUid, ShareId
from dra_driver.model.gpus import DeviceName, Inventory
from dra_driver.model.offer import Device, Offer
from dra_driver.node.state.claim_files import (
    CdiSpecFiles,
    ClaimFiles,
    DriverSpecFile,
    MetadataFiles,
)
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from tests.builders import POOL, allocation, claim, config, gpu, gpu_uuid, inventory, pod, ref
from tests.fakes.node import FakeNode
from tests.fakes.preparers import ClaimWorld
from tests.fakes.users import FakeUsers

LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
DRIVER_ID = "k8s.gpu.nvidia.com/driver=files"


class World(ClaimWorld):
    def __init__(self, directory):
        super().__init__(directory, FakeNode(inventory(3)), CallTimeouts(all=5, hand_over=0.2))
        self.restart()

    def prepare(self, *devices, name="claim", **fields):
        return self.preparer.prepare(self.api.put(claim(*devices, name=name, **fields)))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.mark.point(30)
def test_a_prepared_claim_has_an_answer_a_cdi_file_and_a_record(world):
    (device,) = world.prepare("gpu-1")

    assert device.requests == ("gpu",)
    assert device.pool == POOL
    assert device.device == "gpu-1"
    assert device.cdi_ids == ("k8s.gpu.nvidia.com/claim=uid-claim-gpu-1", DRIVER_ID)
    assert world.spec()["kind"] == "k8s.gpu.nvidia.com/claim"
    assert [d["name"] for d in world.spec()["devices"]] == ["uid-claim-gpu-1"]
    assert world.ledger.records()[0].completed


@pytest.mark.point(101)
def test_every_id_in_the_answer_can_be_resolved_and_the_first_is_of_no_other_device(world):
    answer = world.prepare("gpu-0", "gpu-2")

    known = load_registry([world.directory / "cdi"])
    assert {cdi_id for device in answer for cdi_id in device.cdi_ids} == known.devices.keys()
    assert len({device.cdi_ids[0] for device in answer}) == 2


@pytest.mark.point(22, 23)
@pytest.mark.parametrize("restarted", [False, True])
def test_asking_again_gives_the_same_answer_and_does_nothing(world, restarted):
    first = world.prepare("gpu-0", configs=(LONG,))
    world.api.down = True
    if restarted:
        world.restart()

    assert world.preparer.prepare(ref()) == first
    assert len(world.node.done) == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda world: world.preparer.prepare(ref()),
        lambda world: world.restart(),
        lambda world: world.preparer.restore_files(),
    ],
    ids=["it is asked for again", "a restart", "the repair"],
)
def test_a_cdi_file_that_somebody_removed_is_written_again(world, act):
    world.prepare("gpu-0")
    before = world.spec()
    world.specs.remove(ClaimUid("uid-claim"))

    act(world)

    assert world.spec() == before


def test_a_record_that_vanished_while_running_is_written_again(world):
    first = world.prepare("gpu-0")
    next((world.directory / "claims/boot").iterdir()).unlink()

    assert world.preparer.prepare(ref()) == first
    assert world.restart().prepare(ref()) == first


@pytest.mark.point(91)
def test_the_file_that_a_container_can_read_of_its_device_is_there(world):
    world.prepare("gpu-1")

    (device,) = world.spec()["devices"]
    (mount,) = device["containerEdits"]["mounts"]
    assert mount["containerPath"].endswith("/resourceclaims/claim/gpu/gpu.nvidia.com-metadata.json")
    first, _ = Path(mount["hostPath"]).read_text().splitlines()
    (described,) = json.loads(first)["requests"][0]["devices"]
    assert (described["driver"], described["pool"], described["name"]) == (
        "gpu.nvidia.com",
        POOL,
        "gpu-1",
    )


def test_device_metadata_that_somebody_removed_is_made_anew_with_the_claim(world):
    first = world.prepare("gpu-0")
    (document,) = (world.directory / "plugin").rglob("*.json")
    document.unlink()

    assert world.preparer.prepare(ref()) == first
    assert document.exists()


def test_an_annotation_that_names_no_claim_of_a_pod_is_refused_before_anything_is_touched(world):
    annotated = replace(claim("gpu-0"), pod_claim_name="../../etc")

    with pytest.raises(ClaimError, match="pod-claim-name"):
        world.preparer.prepare(world.api.put(annotated))

    assert world.nothing_left
    assert world.node.done == []


@pytest.mark.point(48, 49, 50, 52, 57, 92)
@pytest.mark.parametrize("then", ["", "the API server is down", "a restart", "the GPU is gone"])
def test_unprepare_takes_everything_back_and_can_be_repeated(world, then):
    world.prepare("gpu-0")
    if then == "a restart":
        world.restart()
    elif then == "the GPU is gone":
        world.node.now = Inventory()
        world.node.refresh()
    world.api.down = then == "the API server is down"

    world.preparer.unprepare(ref())
    world.preparer.unprepare(ref())

    assert world.nothing_left


@pytest.mark.point(19)
def test_a_claim_that_does_not_exist_leaves_nothing(world):
    with pytest.raises(ClaimError, match="does not exist"):
        world.preparer.prepare(ref())

    assert world.nothing_left


@pytest.mark.point(32)
def test_a_device_that_appeared_since_the_last_look_is_found(world):
    world.node.inventory()
    world.node.now = inventory(5)

    assert world.prepare("gpu-4")[0].device == "gpu-4"


@pytest.mark.point(32)
def test_an_unknown_device_is_refused_and_leaves_nothing(world):
    with pytest.raises(UnknownDevice, match="this node has: gpu-0, gpu-1, gpu-2"):
        world.prepare("gpu-9")

    assert world.nothing_left


@pytest.mark.point(33)
def test_a_held_device_is_refused_and_its_holder_untouched(world):
    world.prepare("gpu-0", name="holder")
    before = world.spec("holder")

    with pytest.raises(DeviceHeldByClaim, match="held by claim default/holder"):
        world.prepare("gpu-0")

    assert world.spec("holder") == before
    assert world.spec() is None
    world.preparer.unprepare(ref("holder"))
    assert world.prepare("gpu-0")


def test_prepare_waits_for_the_holder_of_a_force_deleted_pod_to_go(world):
    world.timeouts = CallTimeouts(all=300, hand_over=300)
    world.restart()
    world.prepare("gpu-0", name="holder")
    threading.Timer(0.1, world.preparer.unprepare, [ref("holder")]).start()
    begun = time.monotonic()

    world.prepare("gpu-0")

    assert time.monotonic() - begun < 100
    assert [record.claim.name for record in world.ledger.records()] == ["claim"]


def test_a_full_claim_waits_without_standing_in_the_way_of_other_gpus(world):
    world.timeouts = CallTimeouts(all=40, hand_over=30)
    world.restart()
    world.prepare("gpu-0", name="holder")
    waiting = threading.Thread(
        target=_ignoring(DeviceHeldByClaim, world.prepare), args=("gpu-0", "gpu-1")
    )
    waiting.start()

    begun = time.monotonic()
    world.prepare("gpu-1", name="quick")
    world.preparer.unprepare(ref("quick"))

    assert time.monotonic() - begun < 20
    world.preparer.unprepare(ref("holder"))
    waiting.join()


def _ignoring(error, call):
    def quiet(*args):
        with contextlib.suppress(error):
            call(*args)

    return quiet


@pytest.mark.point(26)
def test_claims_on_different_gpus_are_prepared_side_by_side(world):
    both_inside = threading.Barrier(2, timeout=5)
    world.node.before_nodes = lambda minors: both_inside.wait()
    threads = [
        threading.Thread(target=world.prepare, args=(f"gpu-{n}",), kwargs={"name": f"claim-{n}"})
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(world.ledger.records()) == 2


def test_a_claim_on_a_gpu_that_hangs_gives_up_and_leaves_the_others_alone(world):
    released = threading.Event()
    world.timeouts = CallTimeouts(all=0.3, hand_over=0)
    world.restart()
    world.node.before_nodes = lambda minors: released.wait(5) if minors == (0,) else None
    stuck = threading.Thread(target=world.prepare, args=("gpu-0",), kwargs={"name": "stuck"})
    stuck.start()

    world.prepare("gpu-1", name="quick")
    while not world.ledger.held().get(gpu_uuid()):
        time.sleep(0.01)
    with pytest.raises((TimedOut, DeviceHeldByClaim)):
        world.prepare("gpu-0", name="late")

    released.set()
    stuck.join()


@pytest.mark.point(51)
def test_a_step_that_fails_leaves_nothing_and_the_next_try_works(world):
    def fail(minors):
        raise NodeError("nvidia-modprobe failed")

    world.node.before_nodes = fail
    with pytest.raises(NodeError, match="nvidia-modprobe failed"):
        world.prepare("gpu-0")
    assert world.nothing_left

    world.node.before_nodes = lambda minors: None
    assert world.prepare("gpu-0")


def test_a_driver_root_that_is_incomplete_leaves_nothing(world):
    def fail():
        raise NodeError("libcuda.so is missing in /")

    world.node.before_files = fail
    with pytest.raises(NodeError, match="libcuda"):
        world.prepare("gpu-0")

    assert world.nothing_left


def test_a_cdi_directory_that_cannot_be_written_is_said_and_leaves_nothing(world):
    shutil.rmtree(world.directory / "cdi")
    (world.directory / "cdi").write_text("a file in the way")

    with pytest.raises(NodeError, match="remove the file that stands"):
        world.prepare("gpu-0")

    (world.directory / "cdi").unlink()
    assert world.restart().prepare(ref())


@pytest.mark.point(46)
def test_a_bad_config_is_refused_before_anything_is_touched(world):
    with pytest.raises(ClaimError, match="unknown field"):
        world.prepare("gpu-0", configs=(config(colour="green"),))

    assert world.nothing_left
    assert world.node.done == []


@pytest.mark.point(81)
def test_a_monitor_comes_and_goes_beside_the_user_of_a_gpu(world):
    world.prepare("gpu-0", name="user")
    before = world.spec("user")
    monitor = Claim(ref("monitor"), (allocation(admin=True), allocation("gpu-1", admin=True)))

    assert len(world.preparer.prepare(world.api.put(monitor))) == 2
    world.preparer.unprepare(ref("monitor"))

    assert world.spec("user") == before
    assert [record.claim.name for record in world.ledger.records()] == ["user"]


def test_a_monitor_with_two_requests_for_one_gpu_is_served(world):
    twice = (allocation(admin=True), allocation(request="again", admin=True))

    answer = world.preparer.prepare(world.api.put(Claim(ref(), twice)))

    assert [device.requests for device in answer] == [("gpu",), ("again",)]
    assert len(world.spec()["devices"]) == 1


@pytest.mark.point(29, 30, 31)
def test_requests_shares_and_devices_keep_together(world):
    share = ShareId("0b5a7e8c-0000-4000-8000-000000000000")
    mixed = Claim(ref(), (allocation("gpu-1", "small/one", share=share), allocation("gpu-0", "b")))

    first, second = world.preparer.prepare(world.api.put(mixed))

    assert (first.requests, first.device, first.share) == (("small",), "gpu-1", share)
    assert (second.requests, second.device, second.share) == (("b",), "gpu-0", None)
    assert first.cdi_ids == (f"k8s.gpu.nvidia.com/claim=uid-claim-gpu-1-{share}", DRIVER_ID)


@pytest.mark.point(57, 100)
def test_files_of_no_claim_are_removed_at_start_and_only_ours(world):
    world.prepare("gpu-0")
    cdi = world.directory / "cdi"
    orphan = cdi / "k8s.gpu.nvidia.com-claim_uid-orphan.json"
    orphan.write_text((cdi / "k8s.gpu.nvidia.com-claim_uid-claim.json").read_text())
    theirs = cdi / "k8s.gpu.nvidia.com-claim_uid-orphan.yaml"
    theirs.write_text("cdiVersion: 0.5.0")

    world.restart()

    assert not orphan.exists()
    assert theirs.exists()
    assert world.spec() is not None


class WatchedSpecs(CdiSpecFiles):
    """Calls somebody between the removal of a claim's file and what follows it."""

    removed = staticmethod(lambda: None)

    def remove(self, uid):
        super().remove(uid)
        self.removed()


def test_a_file_is_not_given_back_to_a_claim_that_is_just_being_taken_back(world):
    world.prepare("gpu-0")
    world.specs = WatchedSpecs(world.directory / "cdi", "k8s.gpu.nvidia.com")
    files = ClaimFiles(world.specs, MetadataFiles(world.directory / "plugin"))
    preparer = world.preparer_with(files=files)
    round_ = threading.Thread(target=preparer.restore_files)

    def look_meanwhile():
        round_.start()
        round_.join(0.3)

    world.specs.removed = look_meanwhile
    preparer.unprepare(ref())
    round_.join(5)

    assert world.nothing_left


class Killed(BaseException):
    """kill -9: nothing that would clean up runs, because nobody catches it."""


EFFECTS = [
    "record started",
    "step",
    "driver files",
    "driver's CDI file",
    "metadata",
    "CDI file",
    "record completed",
]


class DyingLedger(Ledger):
    """Dies right after it wrote a record that is (or is not) completed."""

    dies_when_completed: bool | None = None

    def write(self, record):
        super().write(record)
        if record.completed == self.dies_when_completed:
            raise Killed


class DyingSpecs(CdiSpecFiles):
    dies = False

    def write(self, uid, spec):
        text = super().write(uid, spec)
        if self.dies:
            raise Killed
        return text


class DyingDriverSpec(DriverSpecFile):
    """Dies right after it wrote the CDI spec of the driver."""

    def write(self, spec):
        super().write(spec)
        raise Killed


class DyingMetadata(MetadataFiles):
    """Dies while it writes: the file is there, and half of its text."""

    def write(self, documents):
        super().write([replace(document, text=document.text[:9]) for document in documents])
        raise Killed


def die_after(world, effect):
    """A preparer that dies right after the named effect."""

    def die(*args):
        raise Killed

    ledger = DyingLedger(world.directory / "claims", "boot")
    ledger.dies_when_completed = {"record started": False, "record completed": True}.get(effect)
    specs = DyingSpecs(world.directory / "cdi", "k8s.gpu.nvidia.com")
    specs.dies = effect == "CDI file"
    if effect == "driver's CDI file":
        specs.driver.remove()
        specs.driver = DyingDriverSpec(specs.directory, "k8s.gpu.nvidia.com")
    metadata = MetadataFiles(world.directory / "plugin")
    if effect == "metadata":
        metadata = DyingMetadata(world.directory / "plugin")
    files = ClaimFiles(specs, metadata)
    world.node.before_step = die if effect == "step" else world.node.before_step
    world.node.before_files = die if effect == "driver files" else world.node.before_files
    return world.preparer_with(ledger=ledger, files=files, users=FakeUsers())


KILLED = [
    *((effect, (LONG,)) for effect in EFFECTS),
    # A claim that changes nothing on the node is recorded once.
    *((effect, ()) for effect in EFFECTS if effect not in {"record started", "step"}),
]


@pytest.mark.point(24, 61)
@pytest.mark.parametrize(
    ("effect", "configs"), KILLED, ids=lambda value: value if isinstance(value, str) else len(value)
)
@pytest.mark.parametrize("then", ["prepare", "unprepare", "nothing"])
def test_killed_after_any_effect_the_next_start_finds_prepared_or_not_prepared(
    world, effect, configs, then
):
    dying = die_after(world, effect)
    with pytest.raises(Killed):
        dying.prepare(world.api.put(claim("gpu-0", configs=configs)))
    world.node.before_step = lambda step: None
    world.node.before_files = lambda: None

    world.restart()

    completed = effect == "record completed"
    assert (world.spec() is not None) == completed
    assert [record.completed for record in world.ledger.records()] == [True] * completed
    if then == "prepare":
        assert world.preparer.prepare(ref())[0].device == "gpu-0"
        assert world.spec() is not None
    if then == "unprepare":
        world.preparer.unprepare(ref())
        assert world.nothing_left


@pytest.mark.point(60)
def test_a_damaged_record_keeps_its_gpu_from_others_until_it_is_settled(world):
    world.prepare("gpu-0", name="victim")
    record = world.directory / "claims/boot/uid-victim.json"
    record.write_bytes(record.read_bytes()[:-30])
    world.restart()

    with pytest.raises(NodeError, match="may be held by the claim with UID uid-victim") as refused:
        world.prepare("gpu-0", name="other")
    assert "may be held by a claim whose record cannot be read" in refused.value.public
    assert "victim" not in refused.value.public
    assert world.prepare("gpu-1", name="elsewhere")
    assert world.spec("victim") is not None

    world.preparer.unprepare(ref("victim"))
    assert world.prepare("gpu-0", name="other")


def test_a_record_that_says_nothing_at_all_stops_every_new_claim_but_no_old_one(world):
    world.prepare("gpu-1", name="old")
    (world.directory / "claims/boot/uid-victim.json").write_bytes(b"")
    world.restart()

    with pytest.raises(NodeError, match="cannot be read"):
        world.prepare("gpu-0", name="new")
    assert world.preparer.prepare(ref("old"))


def test_what_is_no_file_in_place_of_a_record_stops_no_start_and_no_old_claim(world):
    world.prepare("gpu-1", name="old")
    os.mkfifo(world.directory / "claims/boot/uid-victim.json")
    world.restart()

    assert world.preparer.prepare(ref("old"))
    with pytest.raises(NodeError, match=r"it is no file.* it is settled as soon as"):
        world.prepare("gpu-0", name="new")
    world.preparer.unprepare(ref("victim"))
    assert world.prepare("gpu-0", name="new")


def test_a_gpu_that_could_not_be_seen_when_its_record_was_damaged_is_kept_when_it_is_back(world):
    seen = world.node.now
    world.node.now = Inventory((gpu(1),))
    (world.directory / "claims/boot/uid-victim.json").write_bytes(b"")
    world.restart()
    world.ledger.narrow(ClaimUid("uid-victim"), {DeviceName("gpu-0")}, world.node.refresh().gpus)
    world.node.now = seen
    world.node.refresh()

    with pytest.raises(NodeError, match="may be held by the claim with UID uid-victim"):
        world.prepare("gpu-0", name="other")
    assert not world.preparer.prepared_claims.while_free(gpu(0), lambda: None)
    assert world.prepare("gpu-1", name="elsewhere")


def test_a_gpu_that_is_held_keeps_being_held_when_it_is_no_longer_offered(world):
    world.prepare("gpu-0", name="holder")
    world.node.now = Inventory((gpu(1),))
    world.node.refresh()

    assert [h.claim.name for h in world.ledger.held()[gpu_uuid()]] == ["holder"]


class RenumberedOffers:
    """ "gpu-0" is of another GPU at each look, for so many looks."""

    def __init__(self, times):
        self.minors = (index % 2 for index in range(times))

    def now(self):
        return Offer((Device(gpu(0, uuid=gpu_uuid(next(self.minors, 0)))),))

    refresh = now


def test_a_claim_whose_device_is_of_another_gpu_once_it_is_locked_gets_that_one(world):
    preparer = world.preparer_with(offers=RenumberedOffers(2))

    assert preparer.prepare(world.api.put(claim("gpu-0")))
    assert set(world.ledger.held()) == {gpu_uuid(0)}


def test_a_claim_whose_device_is_of_another_gpu_at_each_attempt_is_refused_in_time(world):
    offers = RenumberedOffers(10**9)
    preparer = world.preparer_with(offers=offers, timeouts=CallTimeouts(all=0, hand_over=0))

    with pytest.raises(NodeError, match="belong to other GPUs at each attempt"):
        preparer.prepare(world.api.put(claim("gpu-0")))
    assert world.nothing_left


def test_a_claim_that_was_allocated_anew_gets_what_it_is_allocated_now(world):
    world.prepare("gpu-0")

    assert world.prepare("gpu-1")[0].device == "gpu-1"
    assert set(world.ledger.held()) == {gpu_uuid(1)}
    assert world.prepare("gpu-0", name="other")


def test_a_claim_is_taken_back_only_if_it_is_still_gone_when_nobody_else_can_act(world):
    world.prepare("gpu-0")

    assert not world.preparer.take_back_if(ref(), lambda: False)
    assert world.spec() is not None
    assert world.preparer.take_back_if(ref(), lambda: True)
    assert world.nothing_left


@pytest.mark.point(25)
def test_two_calls_for_one_claim_at_once_set_it_up_once(world):
    world.api.put(claim("gpu-0", configs=(LONG,)))
    world.node.before_step = lambda step: time.sleep(0.05)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(world.preparer.prepare(ref())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 4
    assert len({tuple(answer) for answer in answers}) == 1
    assert len(world.node.done) == 1


def test_one_claim_that_cannot_be_brought_into_order_leaves_the_others_alone(world):
    world.prepare("gpu-0", name="fine")
    dying = die_after(world, "record started")
    with pytest.raises(Killed):
        dying.prepare(world.api.put(claim("gpu-1", name="stuck", configs=(LONG,))))
    cdi = world.specs.directory
    stuck = cdi / "k8s.gpu.nvidia.com-claim_uid-stuck.json"
    stuck.mkdir()  # what should be removed cannot be

    world.restart()

    assert world.preparer.prepare(ref("fine"))
    assert [record.completed for record in world.ledger.records()] == [True, False]
    with pytest.raises(DeviceHeldByClaim):
        world.prepare("gpu-1", name="next")
    stuck.rmdir()
    world.preparer.recover()
    assert world.prepare("gpu-1", name="next")


def test_a_cdi_directory_that_cannot_be_read_does_not_keep_the_process_from_starting(world):
    world.prepare("gpu-0")
    cdi = world.directory / "cdi"
    cdi.rename(world.directory / "away")
    cdi.write_text("a file in the way")

    world.restart()

    cdi.unlink()
    (world.directory / "away").rename(cdi)
    assert world.preparer.prepare(ref())


def test_waiting_for_everything_together_ends_in_time(world):
    world.timeouts = CallTimeouts(all=0.3, hand_over=40)
    world.restart()
    world.prepare("gpu-0", name="holder")
    begun = time.monotonic()

    with pytest.raises((DeviceHeldByClaim, TimedOut)):
        world.prepare("gpu-0")

    assert time.monotonic() - begun < 30


class Read(dict):
    """A configuration that notes whether the lease is held while it is read."""

    def __init__(self, turns, fields):
        super().__init__(fields)
        self.turns = turns
        self.seen = []

    def items(self):
        self.seen.append(self.turns.held)
        return super().items()


class Turn:
    """Whose turn it is: always ours, and said."""

    def __init__(self):
        self.held = False

    @contextlib.contextmanager
    def __call__(self, seconds):
        self.held = True
        yield
        self.held = False


def test_configurations_are_read_while_nobody_waits_for_it(tmp_path):
    turn = Turn()
    written = Read(turn, {**config().parameters, "colour": "red"})
    world = World(tmp_path)
    world.preparer = world.preparer_with(lease=turn)

    with pytest.raises(ClaimError, match="colour: unknown field"):
        world.prepare("gpu-0", configs=(replace(config(), parameters=written),))

    assert written.seen == [False]


def test_what_a_claim_was_given_stays_its_own_when_its_configuration_is_refused_now(world):
    answered = world.prepare("gpu-0")

    assert world.prepare("gpu-0", configs=(config(colour="red"),)) == answered


def test_a_claim_that_a_process_still_uses_keeps_everything_until_that_ends(world):
    world.prepare("gpu-0")
    world.users.alive[ref().uid] = {pod("train")}
    before = world.spec()

    for give_back in (
        lambda: world.preparer.unprepare(ref()),
        lambda: world.preparer.take_back_if(ref(), lambda: True),
    ):
        with pytest.raises(ClaimInUse, match="pod default/train: process 7 still runs"):
            give_back()
    with pytest.raises(DeviceHeldByClaim):
        world.prepare("gpu-0", name="next")
    assert (world.spec(), world.node.undone) == (before, [])
    assert world.ledger.records()[0].completed

    world.users.alive.clear()
    world.preparer.unprepare(ref())

    assert world.nothing_left


def test_a_claim_of_which_it_cannot_be_told_who_uses_it_keeps_everything(world):
    world.prepare("gpu-0")
    world.users.hidden = NodeError("too many open files")

    with pytest.raises(NodeError, match="too many open files"):
        world.preparer.unprepare(ref())

    assert world.ledger.records()[0].completed


def test_a_claim_that_is_allocated_anew_keeps_what_a_process_still_uses(world):
    world.prepare("gpu-0")
    world.users.alive[ref().uid] = {pod("train")}

    with pytest.raises(ClaimInUse):
        world.prepare("gpu-1")

    assert set(world.ledger.held()) == {gpu_uuid()}


def test_what_was_begun_is_not_taken_back_from_a_process_that_uses_it(world):
    dying = die_after(world, "record started")
    with pytest.raises(Killed):
        dying.prepare(world.api.put(claim("gpu-0", configs=(LONG,))))
    world.users.alive[ref().uid] = {pod("train")}

    world.restart()

    assert set(world.ledger.held()) == {gpu_uuid()}
    world.users.alive.clear()
    world.restart()
    assert world.nothing_left


def test_a_claim_whose_record_only_another_release_understands_stays_as_it_is(world):
    world.prepare("gpu-0")
    (path,) = (world.directory / "claims/boot").glob("*.json")
    ours = path.read_text()
    path.write_text(ours.replace(RELEASE, "0.9.0").replace('"steps":[', '"steps":[{"Dance":{}}'))
    theirs, spec = path.read_text(), world.spec()
    world.restart()

    for ask in (world.preparer.unprepare, world.preparer.prepare):
        with pytest.raises(NodeError, match=r"prepared by release 0\.9\.0.* install release 0.9.0"):
            ask(ref())
    with pytest.raises(NodeError, match=r"has to wait.*install release 0\.9\.0"):
        world.prepare("gpu-0", name="other")
    world.prepare("gpu-1", name="third")
    assert (path.read_text(), world.spec()) == (theirs, spec)

    path.write_text(ours.replace(RELEASE, "0.9.0"))
    world.restart()
    world.preparer.unprepare(ref())
    world.preparer.unprepare(ref("third"))
    assert world.nothing_left


def test_what_another_release_wrote_of_a_claim_outlives_what_this_one_writes(world):
    world.prepare("gpu-0")
    (path,) = (world.directory / "claims/boot").glob("*.json")
    document = json.loads(path.read_text()) | {"release": "0.9.0"}
    document["ClaimRecord"]["holdings"][0]["colour"] = "green"
    path.write_text(json.dumps(document))
    world.restart()

    for name in ("train", "test"):
        joined = replace(world.api.read(ref()), pods=(pod(name),))
        assert world.preparer.prepared_claims.note_pods(joined)

    (holding,) = json.loads(path.read_text())["ClaimRecord"]["holdings"]
    assert holding["colour"] == "green"
    world.restart()
    assert world.ledger.known(ref().uid).pods == (pod("test"),)
    world.preparer.unprepare(ref())
    assert world.nothing_left


def test_a_claim_without_a_readable_record_is_kept_for_its_processes_too(world):
    world.prepare("gpu-0")
    (record,) = (world.directory / "claims/boot").glob("*.json")
    record.write_text("{")
    world.restart()
    world.users.alive[ref().uid] = {pod("train")}

    with pytest.raises(ClaimInUse):
        world.preparer.unprepare(ref())

    assert world.ledger.set_aside()
    world.users.alive.clear()
    world.preparer.unprepare(ref())
    assert not world.ledger.set_aside()
