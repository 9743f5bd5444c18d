"""What is wrong with GPUs outlives a restart, and no reboot."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import GpuUuid, PartitionKey
from dra_driver.model.health import Fault, HealthReading, HealthState, Look, Problem
from dra_driver.node.state.health_file import HealthFile

GPU = GpuUuid("GPU-1")
STATE = HealthState(
    (Fault(GPU, Problem.XID, "79", PartitionKey(19, 3, 1, 1), 1e9 + 0.25, 3, 1e9 + 7),),
    (Look(HealthReading(GPU, recovery_action="NONE", energy_mj=7), 1e9),),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state/health.json"


def test_a_new_process_reads_what_the_last_one_wrote(path):
    HealthFile(path, "boot").write(STATE)

    assert HealthFile(path, "boot").read() == STATE
    assert [file.name for file in path.parent.iterdir()] == ["health.json"]


def test_without_a_file_nothing_is_wrong(path):
    assert HealthFile(path, "boot").read() == HealthState()


def test_after_a_reboot_nothing_is_wrong(path):
    HealthFile(path, "boot").write(STATE)

    assert HealthFile(path, "next").read() == HealthState()


def test_what_a_later_release_wrote_and_this_one_does_not_understand_is_set_aside(path):
    HealthFile(path, "boot").write(STATE)
    later = path.read_text().replace("0.1.0", "0.2.0").replace('"xid"', '"haunted"')
    path.write_text(later)

    assert HealthFile(path, "boot").read() == HealthState()
    assert path.with_name("health.json.damaged").read_text() == later


@pytest.mark.parametrize("act", ["read", "write"])
def test_a_disk_that_fails_is_an_error_that_names_the_file(path, act):
    path.parent.parent.joinpath("state").write_text("a file where a directory has to be")
    file = HealthFile(path, "boot")

    with pytest.raises(NodeError, match=r"health\.json"):
        file.read() if act == "read" else file.write(STATE)


def test_a_directory_in_its_place_is_set_aside(path):
    path.mkdir(parents=True)

    assert HealthFile(path, "boot").read() == HealthState()
    HealthFile(path, "boot").write(STATE)
    assert HealthFile(path, "boot").read() == STATE


def test_a_process_that_only_looks_sets_nothing_aside(path):
    file = HealthFile(path, "boot")
    file.write(STATE)
    assert file.inspect() == STATE

    path.write_bytes(b"{")

    with pytest.raises(NodeError, match="sets it aside at its start"):
        file.inspect()
    assert path.read_bytes() == b"{"
