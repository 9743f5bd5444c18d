"""The MPS agent as a process of this machine, and the end of every server that it started."""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from dra_driver.node.mps.agent_client import MpsAgentClient
from hack.demonstration.plugin import free_port, is_ready
from hack.testbed.cluster import Cluster
from hack.testbed.processes import Process
from hack.testbed.waits import wait_for

NAME = "demo-mps-agent"
READY_SECONDS = 60


class Agent:
    """The agent of *cluster*, whether it runs or not; its record is in *directory*."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._sim = directory / "mps-agent.sim"
        # Not beside the cluster's files: paths of sockets are short.
        name = hashlib.sha256(str(cluster.layout.root).encode()).hexdigest()[:8]
        self.mps_dir = Path(tempfile.gettempdir()) / f"dra-demo-{name}"
        self.process = Process(NAME, cluster.layout.pids / NAME, cluster.log(NAME))

    @property
    def socket(self) -> Path:
        return self.mps_dir / "agent.sock"

    def start(self, sim: str) -> None:
        """Start it; return when it serves."""
        self._sim.write_text(sim)
        port = free_port()
        argv = [sys.executable, "-m", "dra_driver", "mps-agent", f"--mps-dir={self.mps_dir}"]
        argv += [f"--sim={sim}", f"--http-address=127.0.0.1:{port}"]
        self.process.spawn(argv, {"PATH": os.environ["PATH"]})

        def ready() -> bool:
            self.process.check_alive()
            return is_ready(f"http://127.0.0.1:{port}/readyz")

        wait_for("the MPS agent", ready, timeout_seconds=READY_SECONDS, log=self.process.log)

    def end(self) -> None:
        """Stop it and its servers, which would outlive it. Nothing there is success."""
        if not self._sim.exists():
            return
        if any(self.mps_dir.glob("state/s*.json")):
            self._end_servers()
        self.process.stop()
        shutil.rmtree(self.mps_dir, ignore_errors=True)
        self._sim.unlink()

    def _end_servers(self) -> None:
        if self.process.pid() is None:  # it was killed, and its servers were not
            self.start(self._sim.read_text())
        door = MpsAgentClient(self.socket)
        for served in door.status().namespaces():
            door.release(served.namespace.name)
