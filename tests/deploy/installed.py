"""What tests of the installed chart need: a stand-in for the driver, and the pod's own token."""

import json
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.container_image.layers import Link
from hack.testbed import images
from hack.testbed.cluster import Cluster
from hack.testbed.packages import static_busybox

# Names of their own, so that a driver on the same cluster is not disturbed.
SPACE = "chart-test"
RELEASE = "chart-test"
DRIVER = "chart.test"
PLUGIN = f"{RELEASE}-dra-driver-gpu-kubelet-plugin"
AGENT = f"{RELEASE}-dra-driver-gpu-mps-agent"
MPS_DIR = Path("/run/chart-test-mps")
ACCOUNT = f"system:serviceaccount:{SPACE}:{PLUGIN}"
SERVE = b"""#!/bin/sh
trap 'exit 0' TERM
/bin/busybox httpd -f -p "$HTTP_ADDRESS" -h /answers & wait
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """The chart, installed with its pod running."""

    cluster: Cluster
    token: Path  # a kubeconfig that has what the pod has

    def kubectl(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        return run(
            [str(self.cluster.kubectl), *arguments],
            self.cluster.kubeconfig,
            json.dumps(stdin) if stdin else "",
        )

    def inside(self, daemonset: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod of a DaemonSet."""
        return self.kubectl("exec", "--namespace", SPACE, f"daemonset/{daemonset}", "--", *command)


def run(command: list[str], kubeconfig: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={
            "KUBECONFIG": str(kubeconfig),
            "HOME": str(kubeconfig.parent),
            "KUBECACHEDIR": str(Path(tempfile.gettempdir()) / "dra-driver-kubectl-cache"),
            "HELM_CACHE_HOME": str(Path(tempfile.gettempdir()) / "dra-driver-helm-cache"),
            "GOGC": "off",
        },
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def succeed(command: list[str], kubeconfig: Path) -> str:
    answer = run(command, kubeconfig)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def stand_in(cluster: Cluster, directory: Path) -> None:
    """Make the node know an image whose programs, those of the DaemonSets, serve /livez and
    /readyz, and which finds nothing in the way of an uninstall."""
    busybox = static_busybox()
    assert busybox is not None
    directory.joinpath("serve").write_bytes(SERVE)
    directory.joinpath("serve").chmod(0o755)
    directory.joinpath("succeed").write_text("#!/bin/sh\n")
    directory.joinpath("succeed").chmod(0o755)
    image = images.Image(
        "dra.test/stand-in:v1",
        {
            "bin/busybox": busybox,
            **{f"bin/{name}": Link("busybox") for name in ("sh", "cat", "ls", "touch")},
            **{f"bin/{name}": directory / "succeed" for name in ("dra-driver", "uninstall-check")},
            "bin/kubelet-plugin": directory / "serve",
            "bin/mps-agent": directory / "serve",
            "answers/livez": b"ok\n",
            "answers/readyz": b"ok\n",
        },
    )
    images.write_images(directory / "image.tar", [image])
    cluster.import_images(directory / "image.tar")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_account(cluster: Cluster, token: str, path: Path) -> Path:
    """A kubeconfig for *token* alone: the administrator's certificate would win."""
    config = json.loads(
        succeed(
            [str(cluster.kubectl), "config", "view", "--raw", "--minify", "--output=json"],
            cluster.kubeconfig,
        )
    )
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path.write_text(json.dumps(config))
    return path
