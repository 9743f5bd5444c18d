"""Two plugin processes of a node that want one HTTP port, as in an update on the host's network."""

import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dra_driver.base.errors import AddressInUse
from dra_driver.base.http import HttpServer
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances
from dra_driver.plugin.http_port import HttpPort
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.waiting import eventually

OLD, NEW = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def ask(address: str, path: str = "/readyz") -> str:
    """The answer; empty: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as e:
        with e:
            return str(e.read().decode())
    except OSError:
        return ""


class Plugin:
    """A plugin process, as far as its port goes."""

    def __init__(self, home: Path, address: str, name: str) -> None:
        settings: Any = SimpleNamespace(http_address=address, plugin_dir=home, pod_uid=name)
        self.address = address
        self.problem: str | None = "not yet"
        self.started = False
        self._name = name
        self._port = HttpPort(settings, CollectorRegistry())
        self._instances = PluginInstances(home / "instances", name)
        self._ending = ExitStack()
        self._ending.callback(self._instances.leave)
        self._ending.callback(self._port.stop)

    def start(self) -> None:
        self._port.start({}, {self._name: lambda: self.problem}, self._note_started)

    def _note_started(self) -> None:
        self._instances.note_started()
        self.started = True

    def end(self) -> None:
        self._ending.close()


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Callable[[str], Plugin]]:
    address = free_address()
    with ExitStack() as stack:

        def start(name: str) -> Plugin:
            made = Plugin(tmp_path, address, name)
            stack.callback(made.end)
            made.start()
            return made

        yield start


def test_who_finds_the_port_free_serves_at_once_and_says_itself_what_is_wrong(plugin):
    alone = plugin("alone")

    assert alone.started
    assert ask(alone.address) == "[-] alone: not yet\n"


def test_the_older_keeps_the_port_until_it_ends_and_the_newer_has_started_once_it_is_ready(plugin):
    old = plugin("old")
    old.problem = None
    new = plugin("new")

    assert ask(old.address) == "[+] old: ok\n"
    assert not new.started
    new.problem = None
    eventually(lambda: new.started, "the new one to have started")
    assert ask(old.address) == "[+] old: ok\n"

    old.end()
    eventually(lambda: ask(old.address) == "[+] new: ok\n", "the new one to have the port")


def test_a_newer_one_that_is_not_ready_has_not_started_before_the_older_one_ends(plugin, caplog):
    old = plugin("old")
    old.problem = None
    new = plugin("new")
    eventually(lambda: "not ready yet" in caplog.text, "the new one to have looked")
    assert not new.started

    old.end()

    eventually(lambda: ask(old.address) == "[-] new: not yet\n", "the new one to say what is wrong")
    assert new.started  # from now on, its other probes are its own


def test_an_older_one_that_is_never_ready_does_not_keep_the_newer_ones_pod_from_being_so(plugin):
    old = plugin("old")
    new = plugin("new")
    assert ask(old.address) == "[-] old: not yet\n", "neither is ready"

    new.problem = None

    eventually(lambda: ask(old.address) == "[+] old: ok\n", "the new one's pod to be ready")
    new.end()
    eventually(lambda: ask(old.address) == "[-] old: not yet\n", "the old one to be alone")


def test_a_port_that_somebody_else_has_is_an_error(tmp_path):
    address = free_address()
    stranger = HttpServer(address, CollectorRegistry())
    try:
        with pytest.raises(AddressInUse, match=f"{address}' cannot be served"):
            Plugin(tmp_path, address, "alone")
    finally:
        stranger.stop()


def test_an_update_of_processes_on_one_port(
    server: ApiServer,
    kubelet: FakeKubelet,
    start: Callable[..., Process],
    home: Path,
    type_in_pod: Callable[[str], int],
) -> None:
    address = free_address()

    def plugin(uid: str) -> Process:
        return start(pod_uid=uid, http_address=address)

    old = plugin(OLD)
    assert type_in_pod(NEW) == 1  # its process has not begun
    eventually(lambda: type_in_pod(OLD) == 0, "the old one to have started")
    eventually(lambda: "[-]" not in ask(address) and ask(address), "the old one to be ready")
    assert type_in_pod(NEW) == 1

    crashed = plugin(NEW)
    eventually(lambda: type_in_pod(NEW) == 0, "the new one to have started")
    crashed.kill()
    crashed.wait(30)
    assert type_in_pod(NEW) == 1
    assert "[+] registration: ok" in ask(address)

    plugin(NEW)
    eventually(lambda: type_in_pod(NEW) == 0, "the new one to have started")
    old.terminate()
    assert old.wait(30) == 0
    eventually(lambda: "[+] registration: ok" in ask(address), "the new one to have the port")
    assert type_in_pod(OLD) == 1


@pytest.fixture
def type_in_pod(home: Path) -> Callable[[str], int]:
    """The exit code of the startup probe of the pod with this UID."""
    from dra_driver.__main__ import main

    return lambda uid: main(["startup-probe", f"--kubelet-dir={home}/kubelet", f"--pod-uid={uid}"])
