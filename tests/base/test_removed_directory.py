"""A directory that was removed while somebody holds it."""

import os
from pathlib import Path

from dra_driver.base.files import removed_directory


def test_directories_that_are_there_or_not_made_yet_are_fine(tmp_path):
    assert removed_directory([tmp_path, tmp_path / "later"]) is None


def test_a_directory_that_was_removed_and_made_anew_is_not_the_one_that_is_held(tmp_path):
    """What a container has mounted leads to the removed one, as an open directory does."""
    directory = tmp_path / "cdi"
    directory.mkdir()
    held = os.open(directory, os.O_PATH)
    try:
        seen = Path(f"/proc/self/fd/{held}")
        assert removed_directory([seen]) is None

        directory.rmdir()
        directory.mkdir()

        assert "was removed on the host" in str(removed_directory([tmp_path, seen]))
        assert removed_directory([directory]) is None
    finally:
        os.close(held)


def test_a_directory_that_cannot_be_looked_at_is_said(tmp_path):
    (tmp_path / "file").touch()

    assert "Not a directory" in str(removed_directory([tmp_path / "file/inside"]))
