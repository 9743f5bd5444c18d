"""An agent whose disk is full, read-only, or fails for a moment."""

import errno
import itertools

import pytest

from dra_driver.base.errors import NodeError
from tests.agent.conftest import OVER_ONE, TWO, Host, names, namespace
from tests.fakes.disk import FailingCalls, small_disk


@pytest.fixture
def disk(mps_dir):
    with small_disk(mps_dir / "d") as disk:
        yield disk


@pytest.fixture
def host(disk):
    return Host(disk.path)


def file(host):
    return host.directory / "state" / f"{OVER_ONE}.json"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_on_a_full_disk_all_that_is_served_can_be_given_back(host, disk, restarted, dead):
    agent = host.agent()
    for name in ("c_1", "c_2"):
        agent.serve(namespace(name))
    disk.fill()
    if dead:
        host.daemons.crash(OVER_ONE)
    if restarted:
        agent = host.agent()

    agent.release("c_1")
    assert names(agent) == ["c_2"]
    agent.release("c_2")

    assert names(agent) == []
    assert [process for process in host.left() if process != "ballast"] == []


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(host, disk):
    agent = host.agent()
    for name in ("c_1", "c_2"):
        agent.serve(namespace(name))
    disk.fill()
    agent.release("c_1")
    assert "c_1" in file(host).read_text()
    disk.free()

    host.pass_time(agent, 5)

    assert "c_1" not in file(host).read_text()
    assert names(host.agent()) == ["c_2"]


def test_on_a_full_disk_a_namespace_is_refused_clearly_and_nothing_is_begun(host, disk):
    agent = host.agent()
    disk.fill()

    with pytest.raises(NodeError, match="No space left on device"):
        agent.serve(namespace())

    disk.free()
    assert host.left() == []
    assert agent.serve(namespace())


def test_a_read_only_disk_is_an_error_and_all_goes_on_once_it_is_writable(host, disk):
    agent = host.agent()
    agent.serve(namespace())
    disk.make("ro")
    for act in (lambda: agent.serve(namespace("c_2", TWO)), lambda: agent.release("c_1")):
        with pytest.raises(NodeError, match="Read-only file system"):
            act()

    disk.make("rw")

    agent.release("c_1")
    assert agent.serve(namespace("c_2", TWO))
    host.settle(agent)
    assert names(agent) == ["c_2"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_read_for_now_ends_no_server(mps_dir, number):
    host = Host(mps_dir)
    agent = host.agent()
    agent.serve(namespace())
    host.daemons.crash(OVER_ONE)
    host.pass_time(agent, 5)  # an incident
    for at in itertools.count():
        with FailingCalls(mps_dir / "state", at, number) as failing:
            try:
                host.agent()
            except NodeError as error:
                assert "cannot" in str(error)
        successor = host.agent()
        assert names(successor) == ["c_1"]
        assert len(successor.status().incidents) == 1
        assert len(host.daemons.running) == 1
        if failing.calls <= at:
            break
    assert at >= 3, "two files and a directory"
