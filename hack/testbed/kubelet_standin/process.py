"""The stand-in as a process beside a cluster that has no node of its own."""

import os
import sys
from pathlib import Path

from hack.testbed.api import ApiServer
from hack.testbed.cluster import Cluster
from hack.testbed.errors import ClusterError
from hack.testbed.processes import Process
from hack.testbed.state import load_state
from hack.testbed.waits import wait_for

NAME = "kubelet-standin"
READY_SECONDS = 30
GRACE_SECONDS = 15  # it ends the pods' processes first
_REPOSITORY = Path(__file__).parents[3]


def standin(cluster: Cluster) -> Process:
    """The process, whether it runs or not."""
    return Process(NAME, cluster.layout.pids / NAME, cluster.log(NAME))


def start(cluster: Cluster) -> None:
    """Give *cluster* (whose mode is ``control-plane``) a node; running already is success."""
    process = standin(cluster)
    if process.pid() is None:
        minor = cluster.version.split(".")[1]
        flags = {
            "kubeconfig": cluster.kubeconfig,
            "kubelet-dir": cluster.kubelet_dir,
            "cdi-dir": cluster.cdi_dir,
            "node-name": cluster.node_name,
            "pki": cluster.layout.pki,
            "minor": minor,
        }
        argv = [sys.executable, "-m", "hack.testbed.kubelet_standin"]
        argv += [f"--{name}={value}" for name, value in flags.items()]
        process.spawn(argv, {"PATH": os.environ["PATH"], "PYTHONPATH": str(_REPOSITORY)})
    api = _api(cluster)

    def ready() -> bool:
        process.check_alive()
        node = api.get(f"/api/v1/nodes/{cluster.node_name}") or {}
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    condition = "the stand-in kubelet's node to be Ready"
    wait_for(condition, ready, timeout_seconds=READY_SECONDS, log=process.log)


def stop(cluster: Cluster) -> None:
    """End it, and with it the processes of its pods. Not running is success."""
    standin(cluster).stop(grace_seconds=GRACE_SECONDS)


def _api(cluster: Cluster) -> ApiServer:
    state = load_state(cluster.layout.state)
    if state is None:
        raise ClusterError("no cluster is up: `hack/cluster up` brings one up")
    return ApiServer(cluster.layout.pki, state.ports["apiserver"])
