"""Simulated MPS in tests: a host with its tools, daemons that end with the test, clients."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dra_driver.sim.mps.client import main as mps_client
from tests.fakes.simulated import Document, Node
from tests.waiting import eventually

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SECONDS = 10.0
TOKEN = "DRA_DRIVER_MPS_TOKEN"


class MpsHost:
    """A simulated host, and one place for a daemon on it. Paths are short: sockets are in there."""

    def __init__(self, directory: Path, document: Document) -> None:
        self.directory = directory
        directory.chmod(0o755)
        self.node = Node(directory, document)
        assert self.node.host
        self.program = str(self.node.root / "usr/bin/nvidia-cuda-mps-control")
        self.pipe = directory / "p"
        self.log = directory / "l"
        self.token = uuid.uuid4().hex
        self._clients: list[subprocess.Popen[bytes]] = []

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(str(gpu.uuid) for gpu in self.node.live.current().gpus)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": _PATH,
            TOKEN: self.token,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }

    def begin(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """The control program, as a process that may take its time."""
        command = [self.program, *arguments]
        return subprocess.Popen(command, env=self.environment, text=True, **options)

    def run(
        self, *arguments: str, stdin: str = "", user: int | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """The control program, with nothing in its environment but what it is told."""
        return subprocess.run(
            [self.program, *arguments],
            env={**self.environment, **more},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            user=user,
        )

    def output(self, *arguments: str, stdin: str = "") -> list[str]:
        """The lines that a command prints, which succeeds."""
        done = self.run(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.splitlines()

    def refused(self, *arguments: str, stdin: str = "", user: int | None = None) -> str:
        """What a command says that fails."""
        done = self.run(*arguments, stdin=stdin, user=user)
        assert (done.returncode, done.stdout) == (1, ""), done
        return done.stderr.strip()

    def start3(self, *arguments: str) -> None:
        """A daemon of protocol 3 for several users, with a server "gpu" over the first GPU."""
        assert self.run("-p", "3", "-m", "-d", *arguments).returncode == 0
        self.output("server", "create", "gpu", f"--allowed-devices={self.gpus[0]}")
        self.wait_until_ready("gpu")

    def wait_until_ready(self, server: str) -> None:
        def ready() -> bool:
            return self.output("server", "get", server, "status") == ["Ready"]

        eventually(ready, f"{server} is ready")

    def start2(self) -> None:
        """A daemon of protocol 2 over the first GPU."""
        done = self.run("-d", "-M", CUDA_VISIBLE_DEVICES=self.gpus[0])
        assert done.returncode == 0, done

    def client(self, pipe: Path | None = None, user: int | None = None, **more: str) -> int:
        """A process that would use CUDA."""
        where = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe or self.pipe)}
        started = subprocess.Popen(["sleep", "60"], env={"PATH": _PATH, **where, **more}, user=user)
        self._clients.append(started)
        return started.pid

    def end_client(self, pid: int) -> None:
        for started in self._clients:
            if started.pid == pid:
                started.kill()
                started.wait()

    def processes(self) -> dict[int, str]:
        """Everything that carries the token: what it is called, by number."""
        return {pid: name for pid, name in _carrying(self.token)}

    def close(self) -> None:
        for started in self._clients:
            started.kill()
            started.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
            for marker in Path("/dev/shm").glob(f"cuda.shm.*.{pid:x}.*"):
                marker.unlink()


def _carrying(token: str) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes():
                    name = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
                    yield int(entry.name), name
            except OSError:
                continue


@contextmanager
def mps_host(document: Document) -> Iterator[MpsHost]:
    """Nothing of it is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    host = MpsHost(directory, document)
    try:
        yield host
    finally:
        host.close()
        shutil.rmtree(directory)


def run_client(capsys, *arguments: object) -> tuple[int, str]:
    """The exit status of ``mps_client``, and what it says on standard error."""
    capsys.readouterr()  # what was said before
    code = mps_client([*map(str, arguments)])
    return code, capsys.readouterr().err


def shown(capsys, *arguments: object) -> Mapping[str, object]:
    """What ``mps_client`` answers, and it succeeds."""
    capsys.readouterr()  # what was said before
    assert mps_client([*map(str, arguments), "-o", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))
