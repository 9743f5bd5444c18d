"""The GPUs as they last answered outlive a restart of the plugin, and no reboot."""

import pytest

from dra_driver.node.state.known_gpus import KnownGpusFile
from tests.builders import inventory
from tests.fakes.mig import mig_gpu

GPUS = (*inventory(2).gpus, mig_gpu(2, on=True))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state/gpus.json"


def test_a_new_process_knows_them_as_they_were(path):
    KnownGpusFile(path, "boot").keep(GPUS)

    assert KnownGpusFile(path, "boot").read() == GPUS


def test_after_a_reboot_none_is_known(path):
    KnownGpusFile(path, "boot").keep(GPUS)

    assert KnownGpusFile(path, "next").read() == ()


def test_a_file_that_cannot_be_understood_is_as_good_as_none(path):
    path.parent.mkdir()
    path.write_bytes(b"{")

    assert KnownGpusFile(path, "boot").read() == ()


def test_nothing_is_written_while_they_are_the_same_nor_soon_after(path):
    now = [0.0]
    file = KnownGpusFile(path, "boot", lambda: now[0])
    file.keep(GPUS)
    before = path.stat().st_ino

    now[0] = 20.0
    file.keep(tuple(GPUS))
    assert path.stat().st_ino == before
    file.keep(GPUS[:1])
    assert path.stat().st_ino != before
    now[0] = 29.0
    file.keep(GPUS)
    assert file.read() == GPUS[:1]
    now[0] = 30.0
    file.keep(GPUS)
    assert file.read() == GPUS
