"""The ledger: what was begun survives any crash, and nothing is ever silently lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dra_driver.errors import ClaimError, NodeError
from dra_driver.kubeletplugin.claims import ClaimUid, PreparedDevice, ShareId
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.steps import MakeDeviceNodes
from dra_driver.node.ledger import Ledger
from dra_driver.node.records import VERSION, UnreadableRecord, decode_record, encode_record
from tests.fakes.values import ref

BOOT = "boot-1"


def started(name="claim", *devices):
    names = [DeviceName(device) for device in devices or ("gpu-0",)]
    holdings = tuple(Holding(ref(name), device) for device in names)
    return Record(ref(name), holdings, (MakeDeviceNodes((0,)),))


def completed(name="claim", *devices):
    record = started(name, *devices)
    prepared = tuple(
        PreparedDevice(("gpu",), "node-1", holding.device, (f"v/c={holding.device}",))
        for holding in record.holdings
    )
    return replace(record, prepared=prepared, spec="{}")


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


def test_who_holds_what_follows_the_records(ledger):
    ledger.write(completed("b", "gpu-0", "gpu-1"))
    ledger.write(completed("a", "gpu-0"))

    assert [h.claim.name for h in ledger.held()[DeviceName("gpu-0")]] == ["a", "b"]

    ledger.forget(ClaimUid("uid-b"))

    assert [h.claim.name for h in ledger.held()[DeviceName("gpu-0")]] == ["a"]
    assert DeviceName("gpu-1") not in ledger.held()


def test_a_snapshot_of_what_is_held_does_not_change(ledger):
    before = ledger.held()

    ledger.write(completed())

    assert before == {}


@pytest.mark.point(49)
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
        pytest.param(b"[]", "damaged", id="not a record"),
        pytest.param(b'{"version":9,"readableFrom":9}', "newer release", id="newer version"),
        pytest.param(b'{"version":1,"readableFrom":1,"claim":3}', "damaged", id="wrong types"),
    ],
)
def test_an_unreadable_record_is_set_aside_with_its_reason(tmp_path, ledger, text, reason):
    ledger.write(completed("other", "gpu-1"))
    (tmp_path / BOOT / "uid-claim.json").write_bytes(text)

    found = again(tmp_path)

    (aside,) = found.set_aside()
    assert reason in aside.reason
    assert aside.path.read_bytes() == text
    assert [record.claim.name for record in found.records()] == ["other"]


def test_a_damaged_record_still_tells_which_devices_it_names(tmp_path):
    text = encode_record(started("claim", "gpu-2"))[:-20]
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-claim.json").write_bytes(text)

    (aside,) = again(tmp_path).set_aside()

    assert aside.mentions == {"gpu-2"}


def test_a_record_set_aside_stays_set_aside_until_its_claim_is_written_or_forgotten(tmp_path):
    (tmp_path / BOOT).mkdir()
    for name in ("a", "b"):
        (tmp_path / BOOT / f"uid-{name}.json").write_bytes(b"?")
    again(tmp_path)
    found = again(tmp_path)
    assert [aside.uid for aside in found.set_aside()] == ["uid-a", "uid-b"]

    found.write(completed("a"))
    found.forget(ClaimUid("uid-b"))

    assert found.set_aside() == ()
    assert again(tmp_path).set_aside() == ()


def test_a_record_set_aside_is_taken_up_by_a_release_that_can_read_it(tmp_path):
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-claim.unreadable").write_bytes(encode_record(completed()))

    found = again(tmp_path)

    assert found.set_aside() == ()
    assert found.record(ClaimUid("uid-claim")) == completed()


def test_a_record_under_another_name_is_set_aside(tmp_path):
    (tmp_path / BOOT).mkdir()
    (tmp_path / BOOT / "uid-x.json").write_bytes(encode_record(started("claim")))

    (aside,) = again(tmp_path).set_aside()

    assert "it is of claim UID uid-claim" in aside.reason


def test_a_field_of_a_later_release_is_ignored():
    document = json.loads(encode_record(completed()))
    document |= {"version": VERSION + 1, "colour": "green"}

    assert decode_record(json.dumps(document).encode()) == completed()


def test_a_write_that_a_crash_cut_short_is_swept(tmp_path, ledger):
    (tmp_path / BOOT / ".uid-claim.tmp").write_bytes(b'{"version')

    found = again(tmp_path)

    assert found.records() == ()
    assert list((tmp_path / BOOT).iterdir()) == []


def test_a_full_disk_is_said_and_leaves_the_old_record(tmp_path, ledger):
    ledger.write(completed())
    (tmp_path / BOOT / ".uid-claim.tmp").symlink_to("/dev/full")

    with pytest.raises(NodeError, match="No space left on device; free some space there"):
        ledger.write(started())

    assert again(tmp_path).record(ClaimUid("uid-claim")) == completed()


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

    with pytest.raises(NodeError, match="cannot be read"):
        ledger.record(ClaimUid("uid-claim"))


NAMES = st.text("abcdefghij-0123456789", min_size=1, max_size=20)
HOLDINGS = st.builds(
    Holding,
    claim=st.just(ref()),
    device=NAMES.map(DeviceName),
    share=st.none() | NAMES.map(ShareId),
    consumed=st.dictionaries(NAMES, NAMES, max_size=2).map(lambda d: tuple(sorted(d.items()))),
    admin=st.booleans(),
)
PREPARED = st.builds(
    PreparedDevice,
    requests=st.lists(NAMES, max_size=2).map(tuple),
    pool=NAMES,
    device=NAMES,
    cdi_ids=st.lists(NAMES, max_size=2).map(tuple),
    share=st.none() | NAMES.map(ShareId),
)


@given(st.lists(HOLDINGS, max_size=3), st.none() | st.lists(PREPARED, max_size=3), st.text())
def test_a_record_survives_the_disk_unchanged(holdings, prepared, spec):
    done = prepared is not None
    record = Record(
        ref(),
        tuple(holdings),
        (MakeDeviceNodes((0, 3)),),
        tuple(prepared) if prepared is not None else None,
        spec if done else None,
    )

    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_damage_is_noticed_or_harmless(noise, at):
    text = encode_record(completed())
    try:
        decode_record(text[:at] + noise + text[at + len(noise) :])
    except UnreadableRecord as e:
        assert str(e)


@hypothesis_settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["start", "complete", "forget"])),
        max_size=12,
    )
)
def test_what_the_process_knows_and_what_the_disk_says_never_differ(tmp_path_factory, story):
    directory = tmp_path_factory.mktemp("ledger")
    ledger = again(directory)
    for name, what in story:
        if what == "forget":
            ledger.forget(ClaimUid(f"uid-{name}"))
        else:
            ledger.write(started(name) if what == "start" else completed(name))

    found = again(directory)

    assert found.records() == ledger.records()
    assert found.held() == ledger.held()


WRITER = """
import itertools, sys
from pathlib import Path
from tests.node.test_ledger import completed, started
from dra_driver.node.ledger import Ledger
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

        found = again(tmp_path)

        assert found.set_aside() == ()
        assert set(found.records()) <= {started(), replace(completed(), spec=None)}


def test_a_directory_that_somebody_removed_is_made_again(tmp_path, ledger):
    (tmp_path / BOOT).rmdir()

    ledger.write(completed())

    assert again(tmp_path).records()


def test_opening_the_ledger_touches_nothing_while_another_process_writes(tmp_path, ledger):
    (tmp_path / BOOT / ".uid-claim.tmp").write_bytes(b"half")

    Ledger(tmp_path, BOOT)

    assert (tmp_path / BOOT / ".uid-claim.tmp").exists()


def test_the_newer_of_two_readable_records_counts(tmp_path, ledger):
    ledger.write(completed("claim", "gpu-1"))
    old = encode_record(completed("claim", "gpu-0"))
    (tmp_path / BOOT / "uid-claim.unreadable").write_bytes(old)

    assert DeviceName("gpu-1") in again(tmp_path).held()
    assert DeviceName("gpu-0") not in again(tmp_path).held()
