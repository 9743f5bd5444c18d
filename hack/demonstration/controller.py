"""The controller as a process of this machine, with the rights of the chart's role."""

import os
import sys
from pathlib import Path

from hack.demonstration.accounts import write_kubeconfig
from hack.demonstration.kubectl import Kubectl
from hack.demonstration.plugin import free_port, is_ready
from hack.testbed.cluster import Cluster
from hack.testbed.processes import Process
from hack.testbed.waits import wait_for

NAME = "demo-controller"
READY_SECONDS = 60


class Controller:
    """The controller of *cluster*, whether it runs or not; its kubeconfig is in *directory*."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        self._kubeconfig = directory / "controller.kubeconfig"
        self.process = Process(NAME, cluster.layout.pids / NAME, cluster.log(NAME))

    def start(self, kubectl: Kubectl, namespace: str, account: str) -> None:
        """Start it; return when it follows the NodeProfiles."""
        write_kubeconfig(self._cluster, kubectl, namespace, account, self._kubeconfig)
        port = free_port()
        argv = [sys.executable, "-m", "dra_driver", "controller"]
        argv += [f"--kubeconfig={self._kubeconfig}", f"--revision-namespace={namespace}"]
        argv.append(f"--http-address=127.0.0.1:{port}")
        self.process.spawn(argv, {"PATH": os.environ["PATH"]})

        def ready() -> bool:
            self.process.check_alive()
            return is_ready(f"http://127.0.0.1:{port}/readyz")

        wait_for("the controller", ready, timeout_seconds=READY_SECONDS, log=self.process.log)
