"""The ledger: what was begun survives any crash, and nothing is ever silently lost."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dra_driver.base.errors import ClaimError, ClaimRecordLost, NodeError
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName
from dra_driver.model.steps import ServeMpsNamespace, SetTimeSlice, TimeSliceInterval
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.ledger_files import encode_record, read_ledger_directory
from tests.builders import gpu_uuid, holding, record, ref
from tests.fakes.user import let_in, locked_out

BOOT = "boot-1"
GPU = GpuUuid("GPU-0")


STEPS = (SetTimeSlice(gpu_uuid(), TimeSliceInterval.LONG),)


def started(name="claim", *devices):
    return record(name, *devices, completed=False, steps=STEPS)


def completed(name="claim", *devices):
    return record(name, *devices, steps=STEPS)


@pytest.fixture
def ledger(tmp_path):
    return again(tmp_path)


def again(tmp_path, boot=BOOT):
    """The ledger as the next process finds it."""
    ledger = Ledger(tmp_path, boot)
    ledger.reload()
    return ledger


def test_a_completed_claim_is_found_again_whole(tmp_path, ledger):
    ledger.write(started())
    ledger.write(completed())

    assert again(tmp_path).record(ClaimUid("uid-claim")) == completed()


def test_a_started_claim_is_found_again(tmp_path, ledger):
    ledger.write(started())

    assert again(tmp_path).records() == (started(),)
    assert not again(tmp_path).records()[0].completed


def test_what_a_claim_begins_is_on_disk_if_something_of_it_has_to_be_undone(tmp_path, ledger):
    ledger.begin(started("long"))
    ledger.begin(record("plain", completed=False))

    assert [r.claim.name for r in ledger.records()] == ["long", "plain"]
    assert {holding.claim.name for holding in ledger.held()[gpu_uuid()]} == {"long", "plain"}
    assert [r.claim.name for r in again(tmp_path).records()] == ["long"]
    ledger.write(record("plain"))
    assert [r.claim.name for r in again(tmp_path).records()] == ["long", "plain"]


def test_a_claim_that_was_begun_in_memory_only_can_be_forgotten(tmp_path, ledger):
    ledger.begin(record("plain", completed=False))
    ledger.forget(ClaimUid("uid-plain"))

    assert not ledger.records() and not ledger.held()


def test_what_is_begun_for_a_claim_replaces_a_record_that_cannot_be_read(tmp_path, ledger):
    ledger.write(record("plain"))
    path = tmp_path / BOOT / "uid-plain.json"
    path.write_text("{")
    ledger = again(tmp_path)
    ledger.begin(record("plain", completed=False))

    assert not ledger.set_aside()
    assert [r.completed for r in again(tmp_path).records()] == [False]


def test_who_holds_what_follows_the_records(ledger):
    ledger.write(completed("b", "gpu-0", "gpu-1"))
    ledger.write(completed("a", "gpu-0"))

    assert [h.claim.name for h in ledger.held()[gpu_uuid()]] == ["a", "b"]

    ledger.forget(ClaimUid("uid-b"))

    assert [h.claim.name for h in ledger.held()[gpu_uuid()]] == ["a"]
    assert gpu_uuid(1) not in ledger.held()


def test_a_snapshot_of_what_is_held_does_not_change(ledger):
    before = ledger.held()

    ledger.write(completed())

    assert before == {}


@pytest.mark.point(49)
def test_the_records_are_the_same_object_until_one_of_them_changes(tmp_path, ledger):
    ledger.write(completed("b"))
    before = ledger.records()
    assert ledger.records() is before

    ledger.write(completed("a"))
    assert [each.claim.name for each in ledger.records()] == ["a", "b"]
    ledger.write(replace(completed("a"), pods=(Pod("web", PodUid("uid-web")),)))
    assert [len(each.pods) for each in ledger.records()] == [1, 0]
    ledger.forget(ref("a").uid)
    assert ledger.records() == before
    again(tmp_path).write(completed("c"))
    ledger.reload()
    assert [each.claim.name for each in ledger.records()] == ["b", "c"]


def test_forgetting_the_unknown_is_success(ledger):
    ledger.forget(ClaimUid("never-seen"))


@pytest.mark.point(58)
def test_records_of_an_earlier_boot_are_void(tmp_path, ledger):
    ledger.write(completed())

    assert again(tmp_path, "boot-2").records() == ()
    assert [path.name for path in tmp_path.iterdir()] == ["boot-2"]


@pytest.mark.point(60)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(b'{"version":1', "not JSON", id="cut short"),
        pytest.param(b"[]", "it is [], not an object", id="not a record"),
        pytest.param(
            b'{"version":9,"ClaimRecord":{"claim":3,"holdings":[]}}',
            "ClaimRecord.claim is 3, not an object; version is 9, not 1",
            id="newer version",
        ),
    ],
)
def test_an_unreadable_record_is_set_aside_with_its_reason(tmp_path, ledger, text, reason):
    ledger.write(completed("other", "gpu-1"))
    (tmp_path / BOOT / "uid-claim.json").write_bytes(text)

    reopened = again(tmp_path)

    (aside,) = reopened.set_aside()
    assert reason in aside.reason
    assert aside.path.read_bytes() == text
    assert [each.claim.name for each in reopened.records()] == ["other"]


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        pytest.param(
            lambda text: text.replace(b'"version":1', b'"version":9'),
            {"gpu-1", "gpu-2"},
            id="whole",
        ),
        pytest.param(
            lambda text: text[:-20], {"gpu-1", "gpu-2"}, id="cut short behind its holdings"
        ),
        pytest.param(
            lambda text: text[: text.index(b'"holdings":') + 30],
            set(),
            id="cut short within them: what is missing may name others",
        ),
        pytest.param(
            lambda text: text.replace(gpu_uuid(2).encode(), b"GPU-?"),
            {"gpu-1", "gpu-2"},
            id="a UUID damaged: the name counts",
        ),
        pytest.param(
            lambda text: text.replace(b'"device":"gpu-2","gpu"', b'"device":"gpu-2","gqu"'),
            set(),
            id="the UUID of one missing: it may be of any GPU",
        ),
        pytest.param(
            lambda text: text.replace(f'"{gpu_uuid(2)}"'.encode(), b"2"),
            set(),
            id="the UUID of one no text",
        ),
    ],
)
def test_a_damaged_record_tells_which_gpus_it_names(tmp_path, damage, names):
    text = damage(encode_record(started("claim", "gpu-1", "gpu-2"))).replace(
        b'"version":1', b'"version":9'
    )
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-claim.json").write_bytes(text)

    (aside,) = again(tmp_path).set_aside()

    assert aside.names == names
    assert [aside.may_hold(gpu_uuid(n), DeviceName(f"gpu-{n}")) for n in (1, 2)] == [True, True]
    assert aside.may_hold(gpu_uuid(3), DeviceName("gpu-3")) is not bool(names)
    assert aside.may_hold(gpu_uuid(1), DeviceName("gpu-3"))  # a GPU that is called otherwise now


@pytest.mark.parametrize("name", ["old copy.json", ".json", ".uid-claim.json"])
def test_a_file_that_is_no_claims_stays_as_it_is_and_holds_nothing(tmp_path, name):
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / name).write_text("x")

    ledger = again(tmp_path)

    assert ledger.set_aside() == ()
    assert ledger.records() == ()
    assert (tmp_path / BOOT / name).read_text() == "x"


NO_FILES = pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "it is no file"),
        (os.mkfifo, "it is no file"),
        (lambda path: path.symlink_to("nowhere"), "it is a link that leads nowhere"),
        (lambda path: path.symlink_to(path.name), "it is a link that leads nowhere"),
    ],
    ids=["a directory", "a FIFO", "a link to nothing", "a link to itself"],
)


@NO_FILES
def test_what_is_no_file_in_place_of_a_record_is_set_aside_and_the_others_are_read(
    tmp_path, ledger, make, reason
):
    ledger.write(completed("other", "gpu-1"))
    make(tmp_path / BOOT / "uid-claim.json")

    for reopened in (again(tmp_path), again(tmp_path)):
        (aside,) = reopened.set_aside()
        assert (aside.uid, aside.reason) == ("uid-claim", reason)
        assert aside.may_hold(gpu_uuid(), DeviceName("gpu-0"))
        assert [each.claim.name for each in reopened.records()] == ["other"]

    reopened.write(completed())
    assert [each.claim.name for each in again(tmp_path).records()] == ["claim", "other"]
    assert again(tmp_path).set_aside() == ()


@NO_FILES
def test_what_is_no_file_in_place_of_a_record_goes_with_its_claim(tmp_path, ledger, make, reason):
    make(tmp_path / BOOT / "uid-claim.json")
    reopened = again(tmp_path)

    reopened.forget(ClaimUid("uid-claim"))

    assert reopened.set_aside() == ()
    assert list((tmp_path / BOOT).iterdir()) == []


@NO_FILES
def test_a_record_that_was_replaced_by_no_file_is_lost(tmp_path, ledger, make, reason):
    ledger.write(completed())
    (tmp_path / BOOT / "uid-claim.json").unlink()
    make(tmp_path / BOOT / "uid-claim.json")

    with pytest.raises(ClaimRecordLost, match=reason):
        ledger.record(ClaimUid("uid-claim"))


def test_a_directory_with_files_in_place_of_a_record_stays_and_stops_no_other_claim(tmp_path):
    for name in ("uid-claim.json", "uid-claim.unreadable"):
        (tmp_path / BOOT / name / "kept").mkdir(parents=True)

    ledger = again(tmp_path)
    ledger.write(completed("other", "gpu-1"))

    assert [aside.uid for aside in ledger.set_aside()] == ["uid-claim"]
    with pytest.raises(NodeError, match=r"/uid-claim\.json.*remove the directory"):
        ledger.forget(ClaimUid("uid-claim"))
    assert [each.claim.name for each in again(tmp_path).records()] == ["other"]


def test_where_a_directory_keeps_a_record_from_being_set_aside_the_next_record_stays(tmp_path):
    (tmp_path / BOOT / "uid-claim.unreadable").mkdir(parents=True)
    (tmp_path / BOOT / "uid-claim.json").write_bytes(b"?")
    ledger = again(tmp_path)

    ledger.write(completed())

    assert again(tmp_path).records() == (replace(completed(), spec=None),)


def test_a_record_set_aside_stays_set_aside_until_its_claim_is_written_or_forgotten(tmp_path):
    (tmp_path / BOOT).mkdir()
    for name in ("a", "b"):
        (tmp_path / BOOT / f"uid-{name}.json").write_bytes(b"?")
    again(tmp_path)
    reopened = again(tmp_path)
    assert [aside.uid for aside in reopened.set_aside()] == ["uid-a", "uid-b"]

    reopened.write(completed("a"))
    reopened.forget(ClaimUid("uid-b"))

    assert reopened.set_aside() == ()
    assert again(tmp_path).set_aside() == ()


def test_a_record_set_aside_is_taken_up_by_a_release_that_can_read_it(tmp_path):
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-claim.unreadable").write_bytes(encode_record(completed()))

    reopened = again(tmp_path)

    assert reopened.set_aside() == ()
    assert reopened.record(ClaimUid("uid-claim")) == completed()


def test_a_record_under_another_name_is_set_aside(tmp_path):
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-x.json").write_bytes(encode_record(started("claim")))

    (aside,) = again(tmp_path).set_aside()

    assert "it is of claim UID uid-claim" in aside.reason


def test_a_write_that_a_crash_cut_short_is_swept(tmp_path, ledger):
    (tmp_path / BOOT / ".uid-claim.json.tmp").write_bytes(b'{"version')

    reopened = again(tmp_path)

    assert reopened.records() == ()
    assert list((tmp_path / BOOT).iterdir()) == []


@pytest.mark.parametrize("name", [".uid-claim.json.tmp", "uid-claim.partitions"])
def test_an_empty_directory_in_place_of_what_a_crash_left_is_swept(tmp_path, name):
    (tmp_path / BOOT / name).mkdir(parents=True)

    assert again(tmp_path).records() == ()
    assert list((tmp_path / BOOT).iterdir()) == []


def test_all_of_another_boot_is_removed_and_nothing_that_a_link_leads_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    state = tmp_path / "state"
    (state / "boot-0" / "directory").mkdir(parents=True)
    (state / "boot-0" / "directory" / "file").touch()
    (state / "boot-0" / "link").symlink_to(tmp_path / "elsewhere")
    (state / "link").symlink_to(tmp_path / "elsewhere")

    again(state)

    assert sorted(path.name for path in state.iterdir()) == [BOOT, "link"]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_a_full_disk_is_said_and_leaves_the_old_record(tmp_path, ledger):
    ledger.write(completed())
    (tmp_path / BOOT / ".uid-claim.json.tmp").symlink_to("/dev/full")

    with pytest.raises(NodeError, match="No space left on device; free some space there"):
        ledger.write(started())

    assert again(tmp_path).record(ClaimUid("uid-claim")) == completed()


def test_a_peek_knows_what_is_held_and_changes_nothing(tmp_path, ledger):
    ledger.write(completed("other", "gpu-3"))
    half = tmp_path / BOOT / ".uid-x.json.tmp"
    half.write_text("{")
    old = tmp_path / "boot-0"
    old.mkdir()
    before = sorted(tmp_path.rglob("*"))

    peeking = Ledger(tmp_path, BOOT)
    peeking.peek()

    assert set(peeking.held()) == {gpu_uuid(3)}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_peek_where_nothing_was_ever_recorded_finds_nothing(tmp_path):
    peeking = Ledger(tmp_path / "state", BOOT)
    peeking.peek()

    assert peeking.held() == {}
    assert not (tmp_path / "state").exists()


def test_neighbours_hold_any_part_of_the_same_gpu(ledger):
    for name, device in (("a", "gpu-0"), ("b", "gpu-0-1"), ("c", "gpu-1")):
        ledger.write(completed(name, device))

    neighbours = ledger.neighbours(ClaimUid("uid-a"), {gpu_uuid(0)})

    assert [each.claim.name for each in neighbours] == ["b"]


def test_admin_access_alone_makes_no_neighbour(ledger):
    ledger.write(record("a", holding("a")))
    ledger.write(record("b", holding("b", admin=True), holding("b", "gpu-1")))

    def neighbours(gpu):
        return [each.claim.name for each in ledger.neighbours(ClaimUid("uid-c"), {gpu})]

    assert neighbours(gpu_uuid(0)) == ["a"]
    assert neighbours(gpu_uuid(1)) == ["b"]


@pytest.mark.parametrize("uid", ["../x", "", ".x", "a/b"])
def test_a_uid_that_is_none_never_becomes_a_path(ledger, uid):
    with pytest.raises(ClaimError, match="is no UID"):
        ledger.forget(ClaimUid(uid))


def test_waiting_ends_when_something_changed(ledger):
    ledger.write(completed())
    threading.Timer(0.05, ledger.forget, [ClaimUid("uid-claim")]).start()

    ledger.wait_for_change(5)

    assert ledger.held() == {}


def test_a_record_that_vanished_from_the_disk_is_an_error_not_an_empty_answer(tmp_path, ledger):
    ledger.write(completed())
    (tmp_path / BOOT / "uid-claim.json").unlink()

    with pytest.raises(ClaimRecordLost, match="is lost"):
        ledger.record(ClaimUid("uid-claim"))


def test_a_claim_that_is_being_taken_back_is_not_prepared_any_more(tmp_path, ledger):
    ledger.write(completed())
    uid = ClaimUid("uid-claim")

    ledger.end(completed())

    for known in (ledger, again(tmp_path)):
        assert known.records() == (started(),)
        assert known.record(uid) == started()
        assert list(known.held()) == [gpu_uuid()]
    ledger.forget(uid)
    assert again(tmp_path).records() == ()
    assert list((tmp_path / BOOT).iterdir()) == []


def test_a_claim_can_be_taken_back_whose_record_somebody_removed(tmp_path, ledger):
    ledger.write(completed())
    (tmp_path / BOOT / "uid-claim.json").unlink()

    ledger.end(completed())

    assert ledger.records() == (started(),)


def test_a_damaged_record_of_a_claim_that_was_being_taken_back_is_set_aside(tmp_path, ledger):
    ledger.write(completed())
    ledger.end(completed())
    (tmp_path / BOOT / "uid-claim.ending").write_bytes(b"{")

    assert [aside.uid for aside in again(tmp_path).set_aside()] == ["uid-claim"]


@pytest.mark.parametrize("name", ["uid-claim.json", "uid-claim.partitions", "uid-claim.unreadable"])
def test_a_file_that_cannot_be_read_now_is_an_error_and_nothing_is_set_aside(
    tmp_path, ledger, name
):
    ledger.write(completed())
    (tmp_path / BOOT / "uid-claim.json").write_bytes(b"{")  # so that all of them are read
    (tmp_path / BOOT / name).write_bytes(b"{")
    let_in(tmp_path / BOOT)
    (tmp_path / BOOT).chmod(0o777)

    with locked_out(tmp_path / BOOT / name, 0):
        for look in (Ledger(tmp_path, BOOT).peek, Ledger(tmp_path, BOOT).reload):
            with pytest.raises(NodeError, match=f"read the record .*{name}: .*Permission denied"):
                look()

    (tmp_path / BOOT / name).unlink()
    assert again(tmp_path).records() == ()


@hypothesis_settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["start", "complete", "end", "forget"])),
        max_size=12,
    )
)
def test_what_the_process_knows_and_what_the_disk_says_never_differ(tmp_path_factory, story):
    directory = tmp_path_factory.mktemp("ledger")
    ledger = again(directory)
    for name, what in story:
        known = ledger.known(ClaimUid(f"uid-{name}"))
        if what == "forget":
            ledger.forget(ClaimUid(f"uid-{name}"))
        elif what == "end":
            if known is not None:
                ledger.end(known)
        else:
            ledger.write(started(name) if what == "start" else completed(name))

    reopened = again(directory)

    assert reopened.records() == ledger.records()
    assert reopened.held() == ledger.held()


WRITER = """
import itertools, sys
from pathlib import Path
from tests.node.state.test_ledger import completed, started
from dra_driver.node.state.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), "boot-1")
ledger.reload()
print("ready", flush=True)
for n in itertools.count():
    ledger.write(started("claim")); ledger.write(completed("claim"))
    if n % 3 == 0: ledger.forget("uid-claim")
"""


@pytest.mark.point(59)
def test_kill_9_at_any_moment_leaves_a_readable_ledger(tmp_path):
    for pause in (0.0, 0.003, 0.011):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": "."},
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        threading.Event().wait(pause)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()

        reopened = again(tmp_path)

        assert reopened.set_aside() == ()
        assert set(reopened.records()) <= {started(), replace(completed(), spec=None)}


def test_a_directory_that_somebody_removed_is_made_again(tmp_path, ledger):
    (tmp_path / BOOT).rmdir()

    ledger.write(completed())

    assert again(tmp_path).records()


def test_opening_the_ledger_touches_nothing_while_another_process_writes(tmp_path, ledger):
    (tmp_path / BOOT / ".uid-claim.json.tmp").write_bytes(b"half")

    Ledger(tmp_path, BOOT)

    assert (tmp_path / BOOT / ".uid-claim.json.tmp").exists()


def test_the_newer_of_two_readable_records_counts(tmp_path, ledger):
    ledger.write(completed("claim", "gpu-1"))
    old = encode_record(completed("claim", "gpu-0"))
    (tmp_path / BOOT / "uid-claim.unreadable").write_bytes(old)

    assert gpu_uuid(1) in again(tmp_path).held()
    assert gpu_uuid() not in again(tmp_path).held()


def test_a_directory_that_is_not_there_has_no_records(tmp_path):
    assert read_ledger_directory(tmp_path / "claims" / BOOT) == ({}, {})


@pytest.mark.parametrize("mode", [0o000, 0o111], ids=["not entered", "entered only"])
def test_a_directory_that_may_not_be_listed_is_not_taken_for_an_empty_one(mode):
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        directory = Path(made) / "claims"
        Ledger(directory, BOOT).write(completed())

        with (
            locked_out(directory / BOOT, mode),
            pytest.raises(NodeError, match=r"Permission denied: .*; ask as root") as refused,
        ):
            read_ledger_directory(directory / BOOT)

    assert str(directory / BOOT) in str(refused.value)


def test_a_file_where_the_directory_should_be_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "claims").write_text("")

    with pytest.raises(NodeError, match=r"Not a directory: .*; remove the file"):
        read_ledger_directory(tmp_path / "claims" / BOOT)


NAMESPACE = MpsNamespace(MpsNamespaceName("c_0"), ref().uid, (GPU,), 30, (1 << 30,))


def test_claims_under_mps_are_known_apart(tmp_path):
    ledger = again(tmp_path)
    plain, shared = completed(), replace(completed(), steps=(ServeMpsNamespace(NAMESPACE),))
    ledger.write(plain)
    assert ledger.served() == ()

    ledger.write(shared)
    assert [each.claim for each in ledger.served()] == [shared.claim]
    assert [each.claim for each in again(tmp_path).served()] == [shared.claim]

    ledger.write(plain)
    assert ledger.served() == ()
    ledger.write(shared)
    ledger.forget(shared.claim.uid)
    assert ledger.served() == ()
