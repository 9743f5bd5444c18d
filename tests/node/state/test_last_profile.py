"""The profile in force outlives a restart, and never stands in its way."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.profiles import (
    GpuSelector,
    GuardPolicy,
    GuardRules,
    Profile,
    ProfileEntry,
    Rules,
    SharingStrategy,
)
from dra_driver.node.state.profile_files import LastProfileFile

ENTRIES = st.builds(
    ProfileEntry,
    selection=st.builds(
        GpuSelector,
        minors=st.frozensets(st.integers(0, 9)),
        uuids=st.frozensets(st.text("abc").map(GpuUuid)),
        products=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    ),
    rules=st.builds(
        Rules,
        replicas=st.integers(1, 9),
        strategies=st.lists(st.sampled_from(SharingStrategy), max_size=2).map(tuple),
        shares=st.none() | st.integers(1, 9),
        guard=st.builds(GuardRules, st.sampled_from(GuardPolicy), st.floats(0, 100)),
    ),
    path=st.text(max_size=5),
)
PROFILES = st.builds(
    Profile,
    name=st.text(max_size=9),
    entries=st.lists(ENTRIES, max_size=2).map(tuple),
    warnings=st.lists(st.text(max_size=5), max_size=2).map(tuple),
)


@given(PROFILES)
def test_a_profile_survives_the_disk_unchanged(profile):
    with tempfile.TemporaryDirectory() as directory:
        last = LastProfileFile(Path(directory) / "profile.json")
        last.keep(profile)

        assert last.read() == profile


def test_what_is_kept_is_what_is_read(tmp_path):
    last = LastProfileFile(tmp_path / "state" / "profile.json")
    assert last.read() is None

    last.keep(Profile("a"))
    last.keep(Profile("b"))

    assert last.read() == Profile("b")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{", '{"version": 1, "Profile": {"name": 1}}'])
def test_what_cannot_be_understood_counts_as_nothing(tmp_path, text, caplog):
    path = tmp_path / "profile.json"
    path.write_text(text)

    assert LastProfileFile(path).read() is None
    assert "cannot be read" in caplog.text


def test_a_fifo_in_its_place_is_replaced_by_the_next_profile(tmp_path, caplog):
    os.mkfifo(tmp_path / "profile.json")
    last = LastProfileFile(tmp_path / "profile.json")

    assert last.read() is None
    assert "cannot be read" in caplog.text
    last.keep(Profile("a"))
    assert last.read() == Profile("a")


def test_a_disk_that_takes_nothing_is_told_and_no_more(tmp_path: Path, caplog):
    (tmp_path / "state").write_text("a file in the way")

    LastProfileFile(tmp_path / "state" / "profile.json").keep(Profile("a"))

    assert "not kept" in caplog.text
