"""Where the host has SELinux, containers may use what an MPS server has for them."""

import logging
import os
import socket
import tempfile
from pathlib import Path

import pytest

from dra_driver.node.selinux import SELINUX_LABEL, SelinuxLabels


class Attributes:
    """What was set, by where that was then."""

    def __init__(self, fails: OSError | None = None) -> None:
        self.set_at: dict[str, bytes] = {}
        self.fails = fails

    def set(self, path: str, attribute: str, value: bytes, *, follow_symlinks: bool) -> None:
        if self.fails:
            raise self.fails
        assert attribute == "security.selinux"
        assert not follow_symlinks
        directory, _, name = path.rpartition("/")
        self.set_at[os.path.normpath(f"{os.readlink(directory)}/{name}")] = value


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        (Path(made) / "enforce").write_text("1")
        (Path(made) / "pipe/gpu/c_1").mkdir(parents=True)
        yield Path(made)


def test_a_directory_and_what_is_in_it_are_labelled(place):
    pipe = place / "pipe"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{pipe}/gpu/c_1/control")
    (pipe / "gpu/to").symlink_to(place)
    attributes = Attributes()

    SelinuxLabels(place / "enforce", attributes.set).put_on(str(pipe))

    below = ("", "/gpu", "/gpu/to", "/gpu/c_1", "/gpu/c_1/control")
    assert attributes.set_at == {f"{pipe}{path}": SELINUX_LABEL.encode() for path in below}


def test_what_a_tenant_made_in_there_is_not_gone_through(place):
    os.makedirs(place / "pipe/gpu/c_1" / "/".join("d" * 100))
    attributes = Attributes()

    SelinuxLabels(place / "enforce", attributes.set).put_on(str(place / "pipe"))

    assert len(attributes.set_at) == 3


def test_file_systems_and_directories_have_a_label_only_where_there_is_selinux(place):
    attributes = Attributes()
    labels = SelinuxLabels(place / "never", attributes.set)

    labels.put_on(str(place / "pipe"))

    assert (attributes.set_at, labels.mount_option) == ({}, "")
    assert SelinuxLabels(place / "enforce").mount_option == f"context={SELINUX_LABEL}"


def test_a_failure_is_logged_once(place, caplog):
    caplog.set_level(logging.INFO)
    labels = SelinuxLabels(
        place / "enforce", Attributes(OSError(95, "Operation not supported")).set
    )

    for _ in range(3):
        labels.put_on(str(place / "pipe"))

    (record,) = caplog.records
    assert (record.levelname, record.error) == ("WARNING", "Operation not supported")


def test_what_went_meanwhile_is_no_failure(place, caplog):
    gone = SelinuxLabels(place / "enforce", Attributes(FileNotFoundError(2, "gone")).set)

    gone.put_on(str(place / "pipe"))

    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
