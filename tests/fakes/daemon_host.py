"""A simulated host whose MPS daemons are started by the real door, and what is left of them."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsLimits, MpsNamespace, MpsNamespaceName, mps_server_name
from dra_driver.node.driver.commands import RunCommand, run_command
from dra_driver.node.driver.config import DriverPrograms
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.mps.control import DaemonTimeouts
from dra_driver.node.mps.daemon import ControlDaemon
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.node.mps.directories import with_own_shared_memory
from dra_driver.node.mps.mounts import mounted_at_or_below
from dra_driver.node.mps.processes import DaemonProcesses
from dra_driver.sim.host.directory import program_path
from dra_driver.sim.mps.client import main as client
from tests.fakes.simulated import Document, Node, h100

needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)

GIB = 1 << 30
NO_LIMIT = MpsLimits()
PATIENT = DaemonTimeouts(start=20.0, settle=0.0, ask=10.0)  # as a busy machine needs them
BRIEF = DaemonTimeouts(  # of what is not going to happen
    start=1.0, settle=0.0, appearance=0.5, ask=0.3, drain=0.3, quit=0.3, term=0.3, kill=3.0
)
DRIVERS = {2: ("580.95.05", "13.0"), 3: ("615.71.09", "13.4")}


@dataclass
class DaemonHost:
    """Below *directory*, which has to be short, is a host whose driver knows *protocol*."""

    directory: Path
    protocol: int = 3
    shared_memory_bytes: int = 16 << 20
    tokens: list[str] = field(default_factory=list)
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        driver, cuda = DRIVERS[self.protocol]
        gpus = [h100("1b"), h100("43")]
        document: Document = {"driver_version": driver, "cuda_version": cuda, "gpus": gpus}
        self.node = Node(self.directory, document)
        assert self.node.host
        self.gpus = tuple(GpuUuid(str(gpu.uuid)) for gpu in self.node.live.current().gpus)
        self.mps_dir = str(self.directory / "m")

    def change(self, gpu: int | None = None, **fields: object) -> None:
        self.node.change(gpu, **fields)
        self.node.live.current()

    @property
    def driver(self) -> DriverRoot:
        root = str(self.node.root)
        return DriverRoot(root, Path("/"), proc=f"{root}/proc")

    def daemons(
        self, timeouts: DaemonTimeouts = PATIENT, run: RunCommand = run_command
    ) -> MpsDaemons:
        """As a process that knows nothing from before has them."""
        driver = DriverPrograms(self.driver, run, program_path)
        return MpsDaemons(driver, timeouts=timeouts, shared_memory_bytes=self.shared_memory_bytes)

    def daemon(self, gpus: int = 1, default_limits: MpsLimits = NO_LIMIT) -> ControlDaemon:
        gpu_uuids = self.gpus[:gpus]
        name, token = mps_server_name(gpu_uuids), secrets.token_hex(16)
        self.tokens.append(token)
        return ControlDaemon(
            name, gpu_uuids, self.protocol, f"{self.mps_dir}/{name}", token, default_limits
        )

    def namespace(
        self, number: int = 0, memory: int | None = None, percent: int = 30
    ) -> MpsNamespace:
        name = MpsNamespaceName(f"c_{number:024x}")
        return MpsNamespace(name, ClaimUid("u"), self.gpus[:1], percent, (memory,))

    def program(self, daemon: ControlDaemon, pipe_directory: str) -> int:
        """One that computes by way of that directory, as a container would have it."""

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"],
                env={"CUDA_MPS_PIPE_DIRECTORY": pipe_directory},
                stdout=subprocess.PIPE,
            )

        started = (
            with_own_shared_memory(daemon.shm, "/", start) if daemon.protocol == 2 else start()
        )
        self.programs.append(started)
        assert started.stdout
        started.stdout.readline()
        return started.pid

    def attach(self, daemon: ControlDaemon, pipe_directory: str) -> int:
        """A client of it, by the number of its process."""
        pid = self.program(daemon, pipe_directory)
        assert client(["attach", str(pid)]) == 0
        return pid

    def ask(self, daemon: ControlDaemon, *arguments: str, stdin: str = "") -> str:
        """What the program says to somebody else."""
        return subprocess.run(
            [self.node.root / "usr/bin/nvidia-cuda-mps-control", *arguments],
            input=stdin,
            env={"CUDA_MPS_PIPE_DIRECTORY": daemon.pipe, "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=20,
        ).stdout

    def processes(self) -> list[int]:
        """All of daemons that are still there."""
        groups = (DaemonProcesses().of(token) for token in self.tokens)
        return [process.pid for processes in groups for process in processes]

    def left(self) -> list[object]:
        """Everything that a daemon has left behind: processes, mounts, files."""
        files = [str(path) for path in Path(self.mps_dir).glob("*")]
        mounts = mounted_at_or_below(os.path.realpath(self.mps_dir))
        return [*self.processes(), *mounts, *files]

    def end_programs(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()
        self.programs.clear()

    def close(self) -> None:
        """End and take away what tests have left; it can be used again."""
        self.end_programs()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for mounted in mounted_at_or_below(os.path.realpath(self.mps_dir)):
            subprocess.run(["umount", "-l", mounted], check=True)
        self.tokens.clear()
        shutil.rmtree(self.mps_dir, ignore_errors=True)
