"""The formats of files and messages that processes of two releases share: each release reads what
the one before and after it wrote, and takes it back."""

import json
from itertools import chain, pairwise
from pathlib import Path

import pytest

from dra_driver.agent.state import ServerStateFiles
from dra_driver.base.codec import RELEASE
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.time_slices import TimeSlices
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.known_gpus import KnownGpusFile
from dra_driver.node.state.ledger_files import decode_record
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from tests.builders import gpu_uuid
from tests.release_records import (
    CODECS,
    DIRECTORY,
    RecordsWorld,
    broken_rules,
    claim_files,
    other_documents,
    schemas,
)

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests/data/golden/records"
RELEASES = sorted(
    (path.name for path in RECORDS.iterdir()), key=lambda name: [int(n) for n in name.split(".")]
)


def is_out(release):
    return f"\n## {release}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_this_release_writes_is_kept(tmp_path, golden):
    """That of a release that is out stays: what is written otherwise is of the next one."""
    claims = ((f"claims/{name}", text) for name, text in claim_files(tmp_path))
    documents = dict(chain(claims, other_documents(), schemas()))
    kept = RECORDS / RELEASE
    if is_out(RELEASE):
        found = {name: (kept / name).read_text() for name in documents}
        assert found == documents, f"{RELEASE} is out: raise the version and base.codec.RELEASE"
    for name, text in documents.items():
        golden(f"records/{RELEASE}/{name}", text)
    names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()}
    assert names == documents.keys(), "remove the files that are not written any more"


def schema(release, name):
    return json.loads((RECORDS / release / "schemas" / f"{name}.json").read_text())


def test_no_release_changes_a_format_so_that_its_neighbour_cannot_read_it():
    problems = [
        f"{newer}: {name}: {problem}"
        for older, newer in pairwise(RELEASES)
        for name in CODECS
        for problem in broken_rules(schema(older, name), schema(newer, name))
    ]

    assert problems == []


NUMBER = {"type": "integer"}


def new_shape(holding):
    kinds = holding["properties"]["shape"]["oneOf"]
    kinds.append(json.loads(json.dumps(kinds[0]).replace("Exclusive", "Cube")))


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda holding: holding["properties"].update(colour={"default": 1, **NUMBER}), []),
        (lambda holding: holding["properties"].pop("share"), []),
        (new_shape, []),
        (
            lambda holding: [
                holding["properties"].update(colour=NUMBER),
                holding["required"].append("colour"),
            ],
            ["Holding.colour is new and has no default"],
        ),
        (
            lambda holding: holding["properties"].pop("gpu"),
            ["Holding.gpu is gone and had no default"],
        ),
        (
            lambda holding: holding["properties"].update(gpu=NUMBER),
            ["Holding.gpu is of another type"],
        ),
        (
            lambda holding: holding["properties"]["offered"].update(items=NUMBER),
            ["Holding.offered[] is of another type"],
        ),
        (
            lambda holding: holding["properties"]["limit"]["anyOf"].pop(),
            ['Holding.limit is no longer [{"type": "null"}]'],
        ),
    ],
)
def test_a_format_that_a_neighbour_cannot_read_is_noticed(change, problems):
    before, after = schema(RELEASE, "ClaimRecord"), schema(RELEASE, "ClaimRecord")
    change(after["$defs"]["Holding"])

    assert list(broken_rules(before, after)) == problems


def written_by(release, directory):
    """A node as *release* left it, and its claims: what was done for them is done, the process that
    did it is gone."""
    world = RecordsWorld(directory)
    found = world.state_copy()
    world.ledger_directory().mkdir(parents=True)
    for path in (RECORDS / release / "claims").iterdir():
        text = path.read_text().replace(DIRECTORY, str(directory))
        (world.ledger_directory() / path.name).write_text(text)
        if path.suffix == ".json":
            for step in decode_record(text.encode()).steps:
                world.node.carry_out(step)
    assert world.state_copy() != found
    return world, found


@pytest.mark.parametrize("release", RELEASES)
def test_every_claim_that_a_release_prepared_is_taken_back(tmp_path, release):
    world, found = written_by(release, tmp_path)

    world.restart()
    prepared = [record.claim for record in world.ledger.records()]
    assert world.ledger.set_aside() == ()
    assert {"whole", "interval", "fraction", "mps", "server", "partition", "shapes"} == {
        claim.name for claim in prepared
    }
    for claim in prepared:
        world.preparer.unprepare(claim)

    assert world.nothing_left
    world.node.settle(())  # the limits of pods, which are none of a claim's
    assert world.state_copy() == found


@pytest.mark.parametrize("release", RELEASES)
def test_every_claim_that_a_release_prepared_is_answered_as_then(tmp_path, release):
    world, _ = written_by(release, tmp_path)
    world.api.down = True  # the answers are the recorded ones
    world.restart()

    for known in world.ledger.records():
        record = world.ledger.record(known.claim.uid)
        if record.documents:
            assert world.preparer.prepare(record.claim) == record.prepared
            assert world.spec(record.claim.name) == json.loads(record.spec)


@pytest.mark.parametrize("release", RELEASES)
def test_every_state_and_message_of_a_release_is_read(tmp_path, release):
    kept = RECORDS / release
    for kind in ("AgentRequest", "AgentAnswer"):
        for path in (kept / kind).iterdir():
            message = CODECS[kind].decode(path.read_bytes())
            assert type(message).__name__ == path.stem
    state = tmp_path / "state"
    state.mkdir()
    for path in (kept / "mps/state").iterdir():
        (state / path.name).write_bytes(path.read_bytes())
    files = ServerStateFiles(state)
    (server,) = files.load()

    assert (files.set_aside, files.of_other_release) == ({}, {})
    assert (server.daemon.name, len(server.served), len(files.incidents)) == ("s0", 1, 1)
    assert MigStateFile(kept / "mig.json", "boot").read().switched == (gpu_uuid(),)
    assert len(KnownGpusFile(kept / "gpus.json", "boot").read()) == 1
    assert len(HealthFile(kept / "health.json", "boot").read().faults) == 2
    served = ServedApi(AllocationApi.DEVICE_PLUGIN, draining=True)
    assert ServedApiFile(kept / "api.json").read() == served
    profile = LastProfileFile(kept / "profile.json").read()
    assert profile is not None
    assert profile.name == "mine"


def test_the_note_of_an_interval_that_is_to_be_restored_is_a_number_and_the_boot(tmp_path):
    """Another format, whose first release was 0.1.0: it has no codec, and does not change."""
    slices = TimeSlices(DriverRoot("/", Path("/")), tmp_path, "boot")
    (tmp_path / f"{gpu_uuid()}.to-restore").write_text("3 boot")

    assert slices.unrestored() == {gpu_uuid(): TimeSliceInterval.LONG}
