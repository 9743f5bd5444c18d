"""What was made of GPUs outlives a restart, and what does not outlive a boot is forgotten."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.model.mig_layouts import (
    LayoutBefore,
    LayoutInstance,
    LayoutOutcome,
    LayoutState,
    MigState,
)
from dra_driver.node.state.mig_state import MigStateFile

GPU = GpuUuid("GPU-1")
KEY = PartitionKey(19, 3, 1, 1)
FULL = MigState(
    {GPU: (LayoutInstance(KEY, 7, "MIG-1"),)},
    {GPU: LayoutBefore(True, (KEY,))},
    (GPU,),
    (GPU,),
    {GPU: LayoutOutcome("x", LayoutState.FAILED, "why")},
    {GPU: "why not"},
    "no such layout",
    LayoutState.FAILED,
    True,
    label="few",
)
LASTING = MigState(switched=(GPU,), labelled=True, label="few")
DAMAGED = pytest.mark.parametrize(
    "text", ["", "{", '{"boot": 1}', '{"boot": "b", "state": {"instances": []}}']
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state/mig.json"


def test_a_new_process_reads_what_the_last_one_wrote(path):
    MigStateFile(path, "boot").write(FULL)

    assert MigStateFile(path, "boot").read() == FULL
    assert [file.name for file in path.parent.iterdir()] == ["mig.json"]


def test_a_state_is_read_again_only_when_the_file_changed(path):
    ours, theirs = MigStateFile(path, "boot"), MigStateFile(path, "boot")
    ours.write(FULL)
    before = ours.read()
    assert ours.read() is before

    theirs.write(replace(FULL, label="many"))
    assert ours.read().label == "many"
    ours.change(lambda state: replace(state, label="fine"))

    assert (ours.read().label, theirs.read().label) == ("fine", "fine")


def test_without_a_file_nothing_was_made(path):
    assert MigStateFile(path, "boot").read() == MigState()


def test_after_a_boot_only_the_mig_mode_of_boards_and_labels_are_remembered(path):
    MigStateFile(path, "boot").write(FULL)

    assert MigStateFile(path, "next").read() == LASTING


@DAMAGED
def test_a_damaged_state_is_never_taken_for_an_empty_one(path, text):
    path.parent.mkdir()
    path.write_text(text)

    with pytest.raises(NodeError, match="cannot be understood, so it is not known which MIG"):
        MigStateFile(path, "boot").read()


def test_a_state_that_cannot_be_opened_is_told(path):
    path.parent.mkdir()
    path.symlink_to(path)

    with pytest.raises(NodeError, match=r"cannot read .*mig\.json"):
        MigStateFile(path, "boot").read()


@DAMAGED
def test_a_damaged_state_is_set_aside_when_it_is_changed_and_that_is_told(path, text, caplog):
    path.parent.mkdir()
    path.write_text(text)
    state = MigStateFile(path, "boot")

    assert state.change(lambda before: replace(before, switched=(GPU,))) == MigState(
        switched=(GPU,)
    )

    assert state.read() == MigState(switched=(GPU,))
    assert (path.parent / "mig.json.damaged").read_text() == text
    assert "counts as somebody else's from now on" in caplog.text


def test_a_state_that_only_another_release_understands_is_told_and_left_as_it_is(path):
    state = MigStateFile(path, "boot")
    state.write(MigState(state=LayoutState.FAILED))
    theirs = path.read_text().replace(RELEASE, "0.9.0").replace('"failed"', '"paused"')
    path.write_text(theirs)

    with pytest.raises(NodeError, match=r"release 0\.9\.0 wrote it.*install that release again"):
        state.change(lambda before: replace(before, switched=(GPU,)))
    assert path.read_text() == theirs


def test_what_another_release_wrote_outlives_a_change_by_this_one(path):
    state = MigStateFile(path, "boot")
    state.write(MigState())
    document = json.loads(path.read_text()) | {"release": "0.9.0"}
    document["MigStateOfBoot"]["state"]["colour"] = "green"
    path.write_text(json.dumps(document))

    state.change(lambda before: replace(before, switched=(GPU,)))

    assert state.read() == MigState(switched=(GPU,))
    assert json.loads(path.read_text())["MigStateOfBoot"]["state"]["colour"] == "green"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a directory", "a FIFO"])
def test_what_is_no_file_is_set_aside_too(path, make):
    path.parent.mkdir()
    make(path)

    assert MigStateFile(path, "boot").change(lambda state: FULL) == FULL
    assert MigStateFile(path, "boot").read() == FULL
    assert (path.parent / "mig.json.damaged").exists()


def test_a_damaged_state_that_nothing_is_changed_of_is_set_aside_too(path):
    path.parent.mkdir()
    path.write_text("")

    assert MigStateFile(path, "boot").change(lambda state: state) == MigState()
    assert MigStateFile(path, "boot").read() == MigState()


def test_a_damaged_state_that_cannot_be_set_aside_is_told(path):
    path.parent.mkdir()
    path.write_text("{")
    (path.parent / "mig.json.damaged").mkdir()

    with pytest.raises(NodeError, match="cannot be set aside"):
        MigStateFile(path, "boot").change(lambda state: state)


def test_a_change_is_of_what_is_there_and_what_changes_nothing_is_not_written(path):
    MigStateFile(path, "boot").write(FULL)
    written = path.stat().st_mtime_ns, path.stat().st_ino

    state = MigStateFile(path, "boot")
    assert state.change(lambda before: before) == FULL
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    assert state.change(lambda before: replace(before, switched=())).left_on == (GPU,)


def test_changes_of_several_threads_are_all_kept(path):
    state = MigStateFile(path, "boot")

    def add(number):
        gpu = GpuUuid(f"GPU-{number}")
        state.change(
            lambda before: replace(before, mode_problems={**before.mode_problems, gpu: "why"})
        )

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(state.read().mode_problems) == 8


def test_what_a_killed_writer_left_goes_with_the_next_change(path):
    path.parent.mkdir()
    (path.parent / ".mig.json.tmp").write_text("half")

    MigStateFile(path, "boot").write(FULL)

    assert [file.name for file in path.parent.iterdir()] == ["mig.json"]


def test_a_state_that_cannot_be_written_is_told_and_the_old_one_stays(path):
    state = MigStateFile(path, "boot")
    state.write(FULL)
    (path.parent / ".mig.json.tmp").mkdir()

    with pytest.raises(NodeError, match=r"cannot write .*mig\.json.*--state-dir"):
        state.write(MigState())
    assert state.read() == FULL
