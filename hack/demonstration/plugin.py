"""The kubelet plugin as a process of this machine, with the rights of the chart's role."""

import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

from hack.demonstration.accounts import write_kubeconfig
from hack.demonstration.kubectl import Kubectl, call
from hack.testbed.cluster import Cluster
from hack.testbed.processes import Process
from hack.testbed.waits import wait_for

NAME = "demo-plugin"
READY_SECONDS = 60
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Plugin:
    """The plugin of *cluster*, whether it runs or not; its files are in *directory*.

    *mps_socket*: of the MPS agent; empty where there is none. *profile*: of the node; empty: the
    one called default.
    """

    def __init__(
        self, cluster: Cluster, directory: Path, mps_socket: str = "", profile: str = ""
    ) -> None:
        self._cluster = cluster
        self._profile = profile
        self._mps_socket = mps_socket
        self._kubeconfig = directory / "plugin.kubeconfig"
        self.process = Process(NAME, cluster.layout.pids / NAME, cluster.log(NAME))

    @property
    def socket(self) -> Path:
        return self._cluster.kubelet_dir / "plugins/gpu.nvidia.com/dra.sock"

    def is_served(self) -> bool:
        """Whether a plugin, of ours or another's, answers here."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def start(self, kubectl: Kubectl, namespace: str, account: str, sim: str) -> None:
        """Start it; return when a pod with a claim could use it."""
        bound = ["--bound-object-kind=Node", f"--bound-object-name={self._cluster.node_name}"]
        write_kubeconfig(self._cluster, kubectl, namespace, account, self._kubeconfig, *bound)
        port = free_port()
        flags = {
            "node-name": self._cluster.node_name,
            "kubeconfig": self._kubeconfig,
            "kubelet-dir": self._cluster.kubelet_dir,
            "cdi-dir": self._cluster.cdi_dir,
            "runtime-dir": self._cluster.layout.containerd_state,
            "sim": sim,
            "profile": self._profile,
            "revision-namespace": namespace,
            "mps-socket": self._mps_socket,
            "http-address": f"127.0.0.1:{port}",
        }
        argv = [sys.executable, "-m", "dra_driver", "kubelet-plugin"]
        argv += [f"--{name}={value}" for name, value in flags.items()]
        self.process.spawn(argv, {"PATH": os.environ["PATH"]})

        def ready() -> bool:
            self.process.check_alive()
            return is_ready(f"http://127.0.0.1:{port}/readyz")

        condition = "the plugin to be registered and its GPUs published"
        wait_for(condition, ready, timeout_seconds=READY_SECONDS, log=self.process.log)

    def stop(self) -> None:
        """As its pod's end would. Not running is success."""
        self.process.stop()

    def claims(self, sim: str) -> str:
        """What `dra-driver claims` prints."""
        flags = {
            "kubelet-dir": self._cluster.kubelet_dir,
            "sim": sim,
            "mps-socket": self._mps_socket,
        }
        return _dra_driver("claims", *(f"--{name}={value}" for name, value in flags.items()))

    def doctor(self, sim: str) -> str:
        """What to type to have this node checked."""
        flags = {
            "node-name": self._cluster.node_name,
            "kubelet-dir": self._cluster.kubelet_dir,
            "cdi-dir": self._cluster.cdi_dir,
            "runtime-dir": self._cluster.layout.containerd_state,
            "sim": sim,
            "mps-socket": self._mps_socket,
        }
        return " ".join(
            [".venv/bin/dra-driver doctor", *(f"--{name}={value}" for name, value in flags.items())]
        )

    def picture(self, sim: str) -> str:
        """How the GPUs are divided, as `dra-driver devices` draws it."""
        flags = {
            "kubelet-dir": self._cluster.kubelet_dir,
            "sim": sim,
            "profile": self._profile,
            "mps-socket": self._mps_socket,
        }
        output = _dra_driver("devices", *(f"--{name}={value}" for name, value in flags.items()))
        drawn = (part for part in output.split("\n\n") if "free of" in part)
        return next(drawn, "")


def _dra_driver(*arguments: str) -> str:
    return call([sys.executable, "-m", "dra_driver", *arguments]).rstrip()


def free_port() -> int:
    """Of this machine, as of now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_ready(url: str) -> bool:
    """Whether whoever serves *url* says that it is."""
    try:
        with _LOOPBACK.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as e:
        e.close()
        return False
    except OSError:
        return False
