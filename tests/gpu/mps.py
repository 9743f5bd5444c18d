"""What the MPS tests work with: an agent on this machine's driver, CUDA programs, what is left.

Everything is below one directory, whose name is short, since sockets are in it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dra_driver.agent.dependencies import AgentDependencies
from dra_driver.agent.state import ServerStateFiles
from dra_driver.agent.supervisor import MpsSupervisor
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.node.driver.config import DriverPrograms
from dra_driver.node.mps import mounts
from dra_driver.node.mps.daemon_cgroup import DaemonCgroup
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.plan.prepare.cdi_spec import mps_edits
from tests.gpu.programs import (
    CONTROL,
    END_SECONDS,
    PIPE_DIRECTORY,
    Program,
    end,
    in_use_by,
    mps_processes,
    pids,
    pipe_of,
    program_name,
    until,
)

SHM = "/dev/shm"


class OnlyProtocol2(MpsDaemons):
    """As if the driver had no other."""

    def protocol(self) -> int:
        return 2


class Host:
    """A directory for MPS on this machine, the agent that keeps it, and programs on one GPU."""

    def __init__(
        self, driver: DriverPrograms, gpu: GpuUuid, protocol: int, program: Sequence[str]
    ) -> None:
        """*program*: what every client runs."""
        self.gpu, self.protocol = gpu, protocol
        self.directory = tempfile.mkdtemp(prefix="mps", dir="/tmp")
        os.chmod(self.directory, 0o755)
        self._program = program
        self._programs: list[Program] = []
        self._before = frozenset(mps_processes())
        kind = MpsDaemons if protocol > 2 else OnlyProtocol2
        (empty := Path(self.directory, "proc")).mkdir()
        # Without a look at its cgroup nothing is moved out of this one.
        cgroup = DaemonCgroup(Path("/sys/fs/cgroup"), empty)
        self.daemons = kind(driver, cgroup)
        self.agent = self.another_agent()

    def another_agent(self) -> MpsSupervisor:
        """What a process of the agent starts with."""
        self._files = ServerStateFiles(Path(self.directory, "state"))
        agent = MpsSupervisor(AgentDependencies(self.daemons, self._files, self.directory))
        agent.recover()
        return agent

    def namespace(self, number: int, percent: int, memory: int, tenant: str = "") -> MpsNamespace:
        claim = ClaimUid(f"5b6ffb0e-5d6a-4a3b-9e0b-{number:012x}")
        name = MpsNamespaceName(f"c_{number:024x}")
        return MpsNamespace(name, claim, (self.gpu,), percent, (memory,), tenant=tenant)

    def client(self, served: ServedNamespace, **changes: str | None) -> Program:
        """A program in a container of that claim, but for *changes* of variables (None: it has
        none)."""
        edits = mps_edits(served)
        variables = dict(entry.split("=", 1) for entry in edits.env) | changes
        environment = {name: text for name, text in variables.items() if text is not None}
        shm = next((mount.host_path for mount in edits.mounts if mount.container_path == SHM), "")
        return self._start(environment, shm)

    def stranger(self) -> Program:
        """A program that MPS has nothing to do with."""
        return self._start({PIPE_DIRECTORY: f"{self.directory}/none"}, "")

    def clients(self) -> set[MpsClient]:
        """Whom the agent says that servers serve."""
        return {client for server in self.agent.status().servers for client in server.clients}

    def as_client(self, program: Program, served: ServedNamespace) -> MpsClient:
        """What the agent should call it."""
        return MpsClient(program.pid, served.namespace.name if self.protocol > 2 else None)

    def processes(self) -> dict[int, str]:
        """Every process below our directory that is none of our programs, by number."""
        ours = {program.pid for program in self._programs}
        return {
            pid: program_name(pid)
            for pid in pids()
            if pid not in ours and pipe_of(pid).startswith(f"{self.directory}/")
        }

    def remains(self) -> list[str]:
        """What is there of servers, in words."""
        # Also one that has lost its environment, by which ours are known.
        lost = [pid for pid in mps_processes() if pid not in self._before and not pipe_of(pid)]
        remains = [f"process {pid} (whose?)" for pid in lost]
        remains += [f"process {pid} ({name})" for pid, name in self.processes().items()]
        remains += [f"mount {at}" for at in mounts.mounted_at_or_below(self.directory)]
        remains += [f"server {state.daemon.name}" for state in self._files.load()]
        directory = Path(self.directory, mps_server_name([self.gpu]))
        return [*remains, *([f"directory {directory}"] if directory.exists() else [])]

    def close(self) -> None:
        """Take away whatever is there; what a test asserts came before."""
        for program in self._programs:
            program.end()
        try:
            for state in self._files.load():
                self.daemons.stop_and_remove(state.daemon)
        finally:
            for pid in self.processes():
                end(pid)
            for at in mounts.mounted_at_or_below(self.directory):
                mounts.unmount(at)
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, variables: Mapping[str, str], shm: str) -> Program:
        program = Program(self._program, {"CUDA_VISIBLE_DEVICES": self.gpu, **variables}, shm)
        self._programs.append(program)
        return program


def why_not(driver: DriverPrograms, gpu: GpuUuid, program: Sequence[str]) -> str:
    """Why MPS does not work on this machine, whoever starts it; empty: it does.

    A daemon is started by hand, in the foreground, as the manual has it.
    """
    command = driver.placed(driver.root.command(CONTROL, "-f"))
    if command.root != "/":
        return f"the driver is in a file system of its own, {command.root}"
    directory = tempfile.mkdtemp(prefix="mps", dir="/tmp")
    variables = {PIPE_DIRECTORY: directory, "CUDA_MPS_LOG_DIRECTORY": directory}
    variables["CUDA_VISIBLE_DEVICES"] = gpu
    daemon = subprocess.Popen(
        command.argv,
        env={**command.env, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        control = Path(directory, "control")
        until(control.exists, lambda exists: exists or daemon.poll() is not None)
        if daemon.poll() is not None:
            return f"{CONTROL} -f ended with code {daemon.returncode}: {_logs(directory)}"
        client = Program(program, variables)
        error = client.error or client.ask("compute")
        client.end()
        return f"{error}: {_logs(directory)}" if error else ""
    finally:
        daemon.terminate()
        until(lambda: (daemon.poll(), in_use_by(directory))[1], lambda users: not users, 5.0)
        for pid in in_use_by(directory):
            end(pid)
        daemon.wait(END_SECONDS)
        shutil.rmtree(directory, ignore_errors=True)


def _logs(directory: str) -> str:
    texts = [path.read_text(errors="replace") for path in sorted(Path(directory).glob("*.log"))]
    return "".join(texts).strip()[-1000:]
