"""Which wheels are in the image."""

import doctest
import re
import tomllib

from hack.container_image import wheels
from hack.container_image.build import REPOSITORY, WHEELS_LOCK

LOCKED = set(re.findall(r"^([\w-]+)==", WHEELS_LOCK.read_text(), re.MULTILINE))


def test_the_examples_hold():
    assert doctest.testmod(wheels).failed == 0


def test_what_is_left_out_is_locked_and_nothing_that_the_project_asks_for():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    assert wheels.LEFT_OUT < LOCKED
    assert not wheels.LEFT_OUT & asked


def test_the_wheels_of_the_lock_come_from_the_cache_less_those_that_are_left_out(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DRA_CACHE", str(tmp_path))
    lock = tmp_path / "x.lock"
    lock.write_text("")
    key = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of nothing
    directory = tmp_path / f"wheels-arm64-{key}"
    directory.mkdir()
    for name in ("yarl-1-cp311-x.whl", "pyyaml-6-cp311-x.whl", "grpcio-1-cp311-x.whl"):
        (directory / name).touch()
    found = wheels.locked(lock, "arm64", print)
    assert [path.name for path in found] == ["grpcio-1-cp311-x.whl", "pyyaml-6-cp311-x.whl"]
