"""The partitions that were created for claims are known, whatever becomes of their records."""

import itertools
import json
from dataclasses import replace

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid, MigInstance, PartitionKey
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import CreatePartition, SetMemoryLimits, SetMigMode
from dra_driver.node.state.ledger import Ledger
from tests.builders import gpu_uuid, holding, pod, prepared_device, record, ref

GPU = GpuUuid("GPU-0")
KEY, OTHER = PartitionKey(19, 0, 1, 1), PartitionKey(19, 1, 1, 1)
ONE = (GPU, KEY)


def of(key=KEY, name="claim", uuid="", completed=False):
    instance = MigInstance(key, 1, 0, GpuUuid(uuid)) if uuid else None
    device = f"gpu-0-mig-1g10gb-19-{key.start}"
    part = holding(name, device, gpu=GPU, partition=key, created_for_claims=True, instance=instance)
    steps = (SetMemoryLimits(GPU, ()), SetMigMode(GPU, True, False), CreatePartition(GPU, key))
    prepared = (prepared_device(device),) if completed else None
    return ClaimRecord(ref(name), (part,), steps, prepared, "spec" if completed else None)


def opened(directory):
    ledger = Ledger(directory, "boot")
    ledger.reload()
    return ledger


def damage(directory, name="claim"):
    (directory / "boot" / f"uid-{name}.json").write_text("{")


def files(directory):
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def ledger(tmp_path):
    return opened(tmp_path)


@pytest.mark.parametrize("uuid", ["", "MIG-1"])
def test_partitions_of_an_unreadable_record_are_known_with_its_steps(tmp_path, ledger, uuid):
    written = of(uuid=uuid, completed=bool(uuid))
    ledger.write(written)
    damage(tmp_path)

    again = opened(tmp_path)

    partitions = again.partitions_record(ref().uid)
    assert partitions == ClaimRecord(ref(), written.holdings, written.steps[1:])
    assert again.known(ref().uid) is None
    assert again.held() == {GPU: written.holdings}
    assert again.neighbours(ref("new").uid, {GPU}) == (partitions,)
    assert again.partitions_since(again.mark()) == {ONE}


def test_a_claim_of_whole_gpus_leaves_nothing_behind(tmp_path, ledger):
    ledger.write(record())
    assert files(tmp_path) == ["uid-claim.json"]
    damage(tmp_path)

    again = opened(tmp_path)

    assert (again.partitions_record(ref().uid), again.held()) == (None, {})


@pytest.mark.parametrize("text", ["", "{", '{"version": 4}'])
def test_where_both_are_damaged_nothing_is_known(tmp_path, ledger, text):
    ledger.write(of())
    damage(tmp_path)
    (tmp_path / "boot/uid-claim.partitions").write_text(text)

    again = opened(tmp_path)

    assert again.partitions_record(ref().uid) is None
    assert len(again.set_aside()) == 1


def test_what_is_known_of_another_claim_is_not_taken_for_this_ones(tmp_path, ledger):
    ledger.write(of())
    damage(tmp_path)
    partitions_file = tmp_path / "boot/uid-claim.partitions"
    partitions_file.write_text(partitions_file.read_text().replace("uid-claim", "uid-other"))

    assert opened(tmp_path).partitions_record(ref().uid) is None


@pytest.mark.parametrize("written", [True, False])
def test_a_claim_that_is_written_or_forgotten_leaves_nothing_of_it(tmp_path, ledger, written):
    ledger.write(of())
    damage(tmp_path)
    again = opened(tmp_path)

    if written:
        again.write(record())
    else:
        again.forget(ref().uid)

    assert again.partitions_record(ref().uid) is None
    assert files(tmp_path) == (["uid-claim.json"] if written else [])
    assert set(again.held()) == ({gpu_uuid()} if written else set())


def test_what_a_crash_left_of_a_claim_without_a_record_is_swept(tmp_path, ledger):
    ledger.write(of())
    (tmp_path / "boot/uid-claim.json").unlink()

    assert opened(tmp_path).records() == ()
    assert files(tmp_path) == []


def test_a_full_disk_leaves_what_was_known(tmp_path, ledger):
    ledger.write(of())
    (tmp_path / "boot/.uid-claim.partitions.tmp").mkdir()

    with pytest.raises(Exception, match="the ledger in"):
        ledger.write(of(uuid="MIG-1"))

    assert ledger.known(ref().uid) == of()


def test_a_partition_that_came_and_went_is_known_since_before(ledger):
    mark = ledger.mark()
    ledger.write(of())
    ledger.forget(ref().uid)
    later = ledger.mark()

    assert ledger.partitions_since(mark) == {ONE}
    assert ledger.partitions_since(later) == frozenset()


def test_every_change_is_remembered_for_whoever_began_before_it(ledger):
    began = {}
    moments = itertools.count()
    for key, name in ((KEY, "a"), (OTHER, "b"), (KEY, "c")):
        began[next(moments)] = ledger.mark()
        ledger.write(of(key, name))
        ledger.forget(ref(name).uid)

    since = [{key.start for _, key in ledger.partitions_since(mark)} for mark in began.values()]
    assert since == [{0, 1}, {0, 1}, {0}]


def test_what_another_process_gave_back_is_known_since_before(tmp_path, ledger):
    ledger.write(of())
    mark = ledger.mark()
    opened(tmp_path).forget(ref().uid)

    ledger.reload()

    assert ledger.partitions_since(mark) == {ONE}
    assert ledger.partitions_since(ledger.mark()) == frozenset()


def test_what_another_release_wrote_of_partitions_stays(tmp_path, ledger):
    ledger.write(of(uuid="MIG-1", completed=True))
    for path in (tmp_path / "boot").iterdir():
        document = json.loads(path.read_text()) | {"release": "0.9.0"}
        document["ClaimRecord"]["holdings"][0]["colour"] = "green"
        path.write_text(json.dumps(document))

    again = opened(tmp_path)
    again.write(replace(again.record(ref().uid), pods=(pod(),)))

    for path in (tmp_path / "boot").iterdir():
        (kept,) = json.loads(path.read_text())["ClaimRecord"]["holdings"]
        assert kept["colour"] == "green"
    assert opened(tmp_path).known(ref().uid).pods == (pod(),)


def test_a_directory_in_place_of_the_file_is_an_error_that_says_so(tmp_path, ledger):
    ledger.write(of())
    path = tmp_path / "boot/uid-claim.partitions"
    path.unlink()
    path.mkdir()

    with pytest.raises(NodeError, match=r"uid-claim\.partitions.*remove the directory"):
        opened(tmp_path).write(of())
