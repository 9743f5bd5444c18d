"""The driver's CDI spec is there before a claim is answered, and says what the driver is now."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from tests.builders import claim, config, inventory, ref
from tests.fakes.node import FILES, FakeNode
from tests.fakes.preparers import DRIVER_SPEC, ClaimWorld

LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
UPGRADED = replace(FILES, version="590.1")


class World(ClaimWorld):
    def __init__(self, directory):
        super().__init__(directory, FakeNode(inventory(2)), CallTimeouts(all=5, hand_over=0.2))
        self.file = directory / "cdi" / DRIVER_SPEC
        self.api.put(claim("gpu-0"))
        self.restart()

    @property
    def version(self):
        """Of the driver, as the spec says it; None: there is no spec."""
        if not self.file.exists():
            return None
        (device,) = json.loads(self.file.read_text())["devices"]
        (variable,) = device["containerEdits"]["env"]
        return variable.removeprefix("GPU_DRIVER_VERSION=")

    def whole(self, is_whole):
        self.node.before_files = (lambda: None) if is_whole else incomplete


def incomplete():
    raise NodeError("no complete NVIDIA driver")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_it_is_there_from_the_start(world):
    assert world.version == FILES.version


def test_a_driver_that_comes_after_the_start_has_it_before_the_first_answer(world):
    world.whole(False)
    world.file.unlink()
    world.restart()
    assert world.version is None
    world.whole(True)

    assert world.preparer.prepare(ref())

    assert world.version == FILES.version


def test_it_follows_the_driver_while_no_claim_comes(world):
    assert not world.preparer.driver_spec.is_behind()
    world.node.files = UPGRADED
    assert world.preparer.driver_spec.is_behind()

    world.preparer.driver_spec.keep()

    assert world.version == UPGRADED.version
    assert not world.preparer.driver_spec.is_behind()


def test_while_the_driver_is_incomplete_nothing_is_begun_for_a_claim(world):
    world.whole(False)

    with pytest.raises(NodeError, match="no complete"):
        world.preparer.prepare(world.api.put(claim("gpu-0", configs=(LONG,))))

    assert (world.node.done, world.files_of_claims) == ([], [])


def test_a_claim_is_answered_with_the_driver_that_is_there_then(world):
    world.node.files = UPGRADED

    world.preparer.prepare(ref())

    assert world.version == UPGRADED.version


def test_the_last_one_stays_while_the_driver_is_incomplete(world):
    world.preparer.prepare(ref())
    world.whole(False)

    assert not world.preparer.driver_spec.is_behind()
    with pytest.raises(NodeError, match="no complete"):
        world.preparer.driver_spec.keep()
    world.restart()

    assert world.version == FILES.version
    assert world.preparer.prepare(ref()), "what was prepared is answered again"


def test_one_that_somebody_removed_is_missed_and_comes_back(world):
    world.file.unlink()
    assert world.preparer.driver_spec.is_behind()

    world.preparer.driver_spec.keep()

    assert world.version == FILES.version


@pytest.mark.parametrize("text", ["", "{", '{"cdiVersion": "0.3.0"}'])
@pytest.mark.parametrize("asked_again", [False, True])
def test_one_that_somebody_damaged_is_mended_before_a_claim_is_answered(world, text, asked_again):
    if asked_again:
        world.preparer.prepare(ref())
    world.file.write_text(text)
    assert world.preparer.driver_spec.is_behind()

    world.preparer.prepare(ref())

    assert world.version == FILES.version


@pytest.mark.parametrize("kind", ["directory", "somebody else's"])
def test_what_is_not_ours_in_its_place_is_said_and_left_alone(world, kind):
    world.file.unlink()
    if kind == "directory":
        world.file.mkdir()
    else:
        world.file.write_text('{"cdiVersion": "0.3.0", "kind": "vendor.example/gpu"}')

    with pytest.raises(NodeError, match=r"remove the directory that stands|not ours"):
        world.preparer.prepare(ref())

    assert world.file.exists()
    assert world.files_of_claims == []


def test_a_claim_that_is_asked_for_again_brings_it_back(world):
    first = world.preparer.prepare(ref())
    shutil.rmtree(world.directory / "cdi")

    assert world.preparer.prepare(ref()) == first

    assert world.version == FILES.version


def test_a_prepared_claim_without_it_is_not_answered_while_the_driver_is_incomplete(world):
    world.preparer.prepare(ref())
    world.file.unlink()
    world.whole(False)

    with pytest.raises(NodeError, match="no complete"):
        world.preparer.prepare(ref())

    assert [record.completed for record in world.ledger.records()] == [True]


def test_the_same_driver_is_not_written_again(world):
    before = world.file.stat().st_ino

    world.restart()
    world.preparer.prepare(ref())

    assert world.file.stat().st_ino == before


@pytest.mark.parametrize("text", ["", "{", '{"cdiVersion": "0.3.0"}'])
def test_what_another_process_left_of_it_is_written_anew(world, text):
    world.file.write_text(text)

    world.preparer.recover()

    assert world.version == FILES.version


def test_a_claim_is_refused_where_it_cannot_be_written(world):
    world.file.unlink()
    world.file.mkdir()
    (world.file / "in-the-way").touch()
    world.node.files = UPGRADED

    with pytest.raises(NodeError, match="CDI directory"):
        world.preparer.prepare(ref())

    assert world.files_of_claims == ["in-the-way"]


def test_it_stays_while_the_last_claim_is_given_back(world):
    world.preparer.prepare(ref())

    world.preparer.unprepare(ref())

    assert os.listdir(world.directory / "cdi") == [DRIVER_SPEC]
