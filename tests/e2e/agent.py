"""The MPS agent as a process of this machine, beside the plugin."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dra_driver.base.errors import DriverError
from dra_driver.model.mps import MpsServer, MpsStatus
from dra_driver.node.mps.agent_client import MpsAgentClient
from tests.driver_process import Process, start_driver
from tests.e2e.kube import wait

REPOSITORY = Path(__file__).parents[2]


class Agent:
    """Starts and ends agents over one directory. *node_file*: the simulated node.

    The directory is below /tmp and short: it is part of the paths of sockets.
    """

    def __init__(self, node_file: Path, log_path: Path) -> None:
        self.node_file = node_file
        self.log_path = log_path
        self.directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
        self.socket = self.directory / "agent.sock"
        self.inside: tuple[str, ...] = ()  # a command in which agents are started
        self.process: Process | None = None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise AssertionError("no MPS agent runs")
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def start(self, **flags: str) -> None:
        """Start one, and wait until it answers."""
        arguments = {
            "mps-dir": str(self.directory),
            "sim": str(self.node_file),
            "health-interval": "0.5",
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        with self.log_path.open("ab") as log:
            self.process = start_driver(
                log,
                *("mps-agent", *(f"--{name}={value}" for name, value in arguments.items())),
                inside=self.inside,
            )
        wait("the MPS agent to answer", self._answers, 20)

    def ensure(self) -> None:
        """Start one unless one runs."""
        if self.process is None or self.process.poll() is not None:
            self.start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code. Its daemons stay."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(how)
        return process.wait(10)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def status(self) -> MpsStatus:
        return MpsAgentClient(self.socket).status()

    def server(self, gpu: str) -> MpsServer | None:
        """The server over that GPU and no other."""
        return next((server for server in self.status().servers if server.gpus == (gpu,)), None)

    def remains(self) -> list[str]:
        """What there is of servers: directories, states, processes."""
        names = "s" + "[0-9a-f]" * 12
        paths = [*self.directory.glob(names), *self.directory.glob(f"state/{names}.json")]
        return [*sorted(map(str, paths)), *self.daemons()]

    def daemons(self) -> list[str]:
        """The daemons and servers with a pipe directory below ours, by process number and name."""
        daemons = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
                environment = (process / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            is_mps = Path(name).name.startswith("nvidia-cuda-mps")
            if is_mps and f"={self.directory}/" in environment:
                daemons.append(f"{process.name} {Path(name).name}")
        return sorted(daemons)

    def close(self) -> None:
        """End it with all that it started."""
        self.ensure()
        for served in self.status().namespaces():
            MpsAgentClient(self.socket).release(served.namespace.name)
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _answers(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise AssertionError(f"the MPS agent ended:\n{self.log[-3000:]}")
        try:
            self.status()
        except DriverError:
            return False
        return True

    def client(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """What happens to a simulated client: ``client("attach", pid, "--memory", "5Gi")``."""
        command = [sys.executable, "-m", "dra_driver.sim.mps.client"]
        return subprocess.run(
            [*command, *map(str, arguments)],
            check=False,
            capture_output=True,
            text=True,
            timeout=20,
            cwd=REPOSITORY,
        )
