"""Real processes whose steps hang, each for ever: they end when they are asked to, and say so."""

import fcntl
import itertools
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from dra_driver.k8s.claims import ClaimRef
from tests.builders import config
from tests.driver_process import ROOT, Process
from tests.fakes.api_server import ApiServer
from tests.fakes.driver import program
from tests.fakes.kubelet import FakeKubelet
from tests.pages import read_page
from tests.plugin.conftest import put, whole_process

DRIVER = "gpu.nvidia.com"
LONG = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})
SECONDS = 45.0

pytestmark = pytest.mark.timeout(600)  # three tries, on whatever machine


def wait(what: str, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def fill(process: Process) -> None:
    """Nobody reads its log any more, and not a byte more fits into the pipe."""
    assert process.stderr is not None
    path = f"/proc/self/fd/{process.stderr.fileno()}"
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 16)
        for size in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(size))
    finally:
        os.close(writer)


def ends_in_time(begin: Callable[[], Process]) -> None:
    """Asked to end, it does within 5 s: at one of three tries, since others use the machine."""
    took = []
    while len(took) < 3:
        process = begin()
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        took.append(time.monotonic() - begun)
        if took[-1] < 5:
            return
    raise AssertionError(f"it took {took} seconds")


class Hangs:
    """Steps of a process that hang."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self._programs = home / "programs"
        self._programs.mkdir()
        self._stack = stack
        stack.callback(self._end_programs)

    def file(self, path: Path) -> Callable[[], object]:
        """Whoever reads it waits for ever; what says whether somebody does."""
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        writers: list[int] = []

        def is_read() -> bool:
            with suppress(OSError):  # nobody reads it yet
                writers.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                self._stack.callback(os.close, writers[0])
            return bool(writers)

        return is_read

    def program(self, path: Path) -> Callable[[], object]:
        """It never ends; what says whether it runs."""
        before = len(self._pids())
        program(path, f"touch {self._programs}/$$; exec sleep 600")
        return lambda: len(self._pids()) > before

    def _pids(self) -> Sequence[int]:
        return [int(entry.name) for entry in self._programs.iterdir()]

    def _end_programs(self) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hangs(home: Path) -> Iterator[Hangs]:
    with ExitStack() as stack:
        yield Hangs(home, stack)


def ask(kubelet: FakeKubelet, claim: ClaimRef) -> None:
    """Nobody waits for the answer."""

    def act() -> None:
        with suppress(Exception):
            kubelet.ask("prepare", [claim])

    threading.Thread(target=act, daemon=True).start()


def test_it_ends_in_time_whatever_hangs(
    server: ApiServer,
    kubelet: FakeKubelet,
    start: Callable[..., Process],
    home: Path,
    hangs: Hangs,
) -> None:
    """The disk while a document is read, programs of two GPUs at once, and who reads the log."""
    numbers = itertools.count()
    plugin_dir = home / "kubelet/plugins" / DRIVER

    def begin() -> Process:
        number = next(numbers)
        shutil.rmtree(plugin_dir, ignore_errors=True)
        process = start(source=ROOT)
        kubelet.wait_for_plugin(DRIVER, seconds=SECONDS)
        reads = put(server, "gpu-0", name=f"reads-{number}")
        kubelet.prepare([reads])
        (document,) = plugin_dir.glob(f"metadata/{reads.uid}_*.json")
        is_read = hangs.file(document)
        ask(kubelet, reads)
        wait("its document to be read", is_read)
        runs = hangs.program(plugin_dir / "state/sim/usr/bin/nvidia-smi")
        ask(kubelet, put(server, "gpu-1", "gpu-2", name=f"runs-{number}", configs=(LONG,)))
        wait("the program to run", runs)
        fill(process)
        return process

    ends_in_time(begin)


def test_it_ends_in_time_while_its_start_hangs(
    server: ApiServer, start: Callable[..., Process], home: Path, hangs: Hangs
) -> None:
    token = home / "token"
    kubeconfig = server.kubeconfig(home / "with-token", tokenFile=str(token))

    def begin() -> Process:
        is_read = hangs.file(token)
        process = start(source=ROOT, kubeconfig=str(kubeconfig))
        wait("its token to be read", is_read)
        return process

    ends_in_time(begin)


def test_an_agent_ends_in_time_whatever_hangs(home: Path, hangs: Hangs) -> None:
    """Its disk, and who reads its log."""
    directory = home / "mps"
    state = directory / "state"
    state.mkdir(parents=True)

    def begin() -> Process:
        is_read = hangs.file(state / "incidents.json")
        process = whole_process("mps-agent", "--sim=h100x2-615", f"--mps-dir={directory}")
        started.append(process)
        wait("its incidents to be read", is_read)
        fill(process)
        return process

    started: list[Process] = []
    try:
        ends_in_time(begin)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_directory_that_was_made_anew_on_the_host_is_neither_live_nor_ready(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    """What a container has mounted leads to the old one, as an open directory does."""
    (home / "cdi").mkdir()
    held = os.open(home / "cdi", os.O_PATH)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        start(http_address=f"127.0.0.1:{port}", cdi_dir=f"/proc/{os.getpid()}/fd/{held}")
        page = partial(read_page, port, seconds=SECONDS)
        wait("it to be ready", lambda: page("/readyz")[0] == 200)
        assert page("/livez") == (200, "[+] disk: ok\n[+] directories: ok\n[+] sockets: ok\n")

        shutil.rmtree(home / "cdi")
        (home / "cdi").mkdir()

        wait("it to be dead", lambda: page("/livez")[0] == 503)  # an answer holds a second
        for path in ("/livez", "/readyz"):
            status, body = page(path)
            assert status == 503
            assert f"[-] directories: /proc/{os.getpid()}/fd/{held} was removed on the host" in body
    finally:
        os.close(held)
