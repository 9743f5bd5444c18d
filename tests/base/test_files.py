import os

import pytest

from dra_driver.base.files import write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record"
    write_atomically(path, b"old")
    (tmp_path / ".record.tmp").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["record"]


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_replaces_the_file_and_its_mode(tmp_path, durable):
    path = tmp_path / "record"
    path.write_text("old")

    write_atomically(path, b"new", mode=0o600, durable=durable)

    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_temporary_file_may_be_elsewhere_on_the_file_system(tmp_path):
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "fresh").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "record", b"x", temporary=tmp_path / "aside" / "fresh")

    assert os.listdir(tmp_path / "aside") == []
