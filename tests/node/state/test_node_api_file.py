"""By which API GPUs are given out outlives a restart and a reboot."""

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile

DRAINING = ServedApi(AllocationApi.DEVICE_PLUGIN, draining=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state/api.json"


def test_nothing_is_known_before_anything_was_chosen(path):
    assert ServedApiFile(path).read() is None
    assert ServedApiFile(path).inspect() is None


@pytest.mark.parametrize("served", [ServedApi(AllocationApi.DRA), DRAINING])
def test_the_next_process_knows_what_was_served(path, served):
    ServedApiFile(path).write(served)

    assert ServedApiFile(path).read() == served
    assert ServedApiFile(path).inspect() == served


@pytest.mark.parametrize("text", ["{", '{"version": 1, "release": "0.1.0", "ServedApi": {}}'])
def test_what_cannot_be_understood_is_set_aside_and_told(path, caplog, text):
    path.parent.mkdir()
    path.write_text(text)

    assert ServedApiFile(path).inspect() is None
    assert ServedApiFile(path).read() is None
    assert path.with_name("api.json.damaged").read_text() == text
    assert "what is held tells" in caplog.text
    ServedApiFile(path).write(DRAINING)
    assert ServedApiFile(path).read() == DRAINING


def test_a_disk_that_does_not_keep_it_is_an_error_with_a_remedy(path):
    path.parent.write_text("a file where the directory has to be")

    with pytest.raises(NodeError, match="--state-dir"):
        ServedApiFile(path).write(DRAINING)
