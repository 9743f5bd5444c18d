"""The cache: made once, whole or not there."""

import threading
import time
from pathlib import Path

import pytest

from hack.testbed.cache import made, silent


def test_an_interrupted_making_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        (directory / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "thing", interrupted, silent)
    assert not (tmp_path / "thing").exists()

    made(tmp_path / "thing", lambda directory: (directory / "whole").touch(), silent)
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["whole"]


def test_two_makers_at_once_make_it_once(tmp_path: Path) -> None:
    times_made = []

    def slow(directory: Path) -> None:
        times_made.append(directory)
        time.sleep(0.2)

    makers = [
        threading.Thread(target=made, args=(tmp_path / "thing", slow, silent)) for _ in range(2)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(times_made) == 1
