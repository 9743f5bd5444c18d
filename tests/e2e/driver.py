"""The plugin as a process of this machine, with exactly the rights of its role."""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import yaml
from kubernetes.utils.quantity import parse_quantity

from dra_driver.cli.claims.run import claims
from dra_driver.cli.terminal import Terminal
from dra_driver.settings import ClaimsSettings
from dra_driver.sim.node_spec import node_file
from hack.testbed.assets import minor
from tests.driver_process import Process, start_driver
from tests.e2e.agent import Agent
from tests.e2e.kube import Document, Kube, wait
from tests.e2e.manifests import container, pod_of
from tests.pages import read_page

DRIVER = "gpu.nvidia.com"
NAMESPACE = "dra-driver-gpu"
_HOLDS_TOKEN = "holds-token"
_FIRST_WITH_NODE_TOKENS = 31
LIMITING = "h100x2-615"  # a simulated node whose driver limits memory by cgroup itself


class Driver:
    """Starts and ends kubelet plugins on the node of *cluster*."""

    def __init__(
        self, cluster, kube: Kube, directory: Path, sim: str = "h100x8", **flags: str
    ) -> None:
        """*flags*: of every plugin that it starts."""
        self.cluster = cluster
        self.kube = kube
        self.directory = directory
        self.node_file = directory / "node.yaml"
        self.replace_node(node_file(sim).read_text())
        self.kubeconfig = directory / "plugin.kubeconfig"
        self.log_path = directory / "plugin.log"
        self.flags = flags
        self.inside: tuple[str, ...] = ()  # a command in which plugins are started, such as unshare
        self.program: tuple[str, ...] = ("dra_driver",)  # a module, and its first arguments
        self.agent = Agent(self.node_file, directory / "agent.log")
        self.usual: dict[str, Document] = {}  # the devices of an idle node without a profile
        # What pods can have of an idle node that gives GPUs out by the device-plugin API; else {}.
        self.usual_allocatable: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}

    @property
    def plugin_dir(self) -> Path:
        return self.cluster.kubelet_dir / "plugins" / DRIVER

    @property
    def registry(self) -> Path:
        return self.cluster.kubelet_dir / "plugins_registry"

    @property
    def profiles(self) -> Path:
        """Where profiles and layouts are read from."""
        return Path(self.flags["profiles"])

    @property
    def host(self) -> Path:
        """The root of the simulated host."""
        return self.plugin_dir / "state/sim"

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def write_kubeconfig(self) -> None:
        """What a pod of the plugin's service account has: a CA and a token, bound to the node."""
        admin = yaml.safe_load(self.kube.config.read_text())
        server = dict(admin["clusters"][0]["cluster"])
        if authority := server.get("certificate-authority"):
            server["certificate-authority"] = str(self.kube.config.parent / authority)
        elif data := server.pop("certificate-authority-data", None):
            (self.directory / "ca.crt").write_bytes(base64.b64decode(data))
            server["certificate-authority"] = str(self.directory / "ca.crt")
        (self.directory / "token").write_text(self.token())
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "plugin",
                    "clusters": [{"name": "c", "cluster": server}],
                    "users": [{"name": "u", "user": {"tokenFile": str(self.directory / "token")}}],
                    "contexts": [{"name": "plugin", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )

    def token(self) -> str:
        account = self.kube.all("ServiceAccount", NAMESPACE)
        names = [mount["metadata"]["name"] for mount in account]
        name = next(name for name in names if name.endswith("kubelet-plugin"))
        answer = self.kube.api.create(
            f"{self.kube.path('ServiceAccount', NAMESPACE)}/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {
                    "expirationSeconds": 7200,
                    "boundObjectRef": self._holder_of_token(name),
                },
            },
        )
        return str(answer["status"]["token"])

    def _holder_of_token(self, account: str) -> Document:
        """The node, or a pod on it where tokens cannot be bound to nodes."""
        if minor(self.cluster.version) >= _FIRST_WITH_NODE_TOKENS:
            holder = self.kube.api.get(f"/api/v1/nodes/{self.cluster.node_name}")
        else:
            spec = {"nodeName": self.cluster.node_name, "serviceAccountName": account}
            holder = self.kube.apply(
                pod_of(_HOLDS_TOKEN, [container()], [], **spec), namespace=NAMESPACE
            )
        name, uid = holder["metadata"]["name"], holder["metadata"]["uid"]
        return {"apiVersion": "v1", "kind": holder["kind"], "name": name, "uid": uid}

    def forget_token(self) -> None:
        """The next start has a new one."""
        self.kubeconfig.unlink(missing_ok=True)
        self.kube.delete("Pod", _HOLDS_TOKEN, NAMESPACE)
        self.kube.wait_gone("Pod", _HOLDS_TOKEN, NAMESPACE)

    def start(self, pod_uid: str = "", ready: bool = True, **flags: str) -> Process:
        """Start a plugin; with *ready*, wait until a pod could use it."""
        if not self.kubeconfig.exists():
            self.write_kubeconfig()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.ports[pod_uid] = free.getsockname()[1]
        arguments = {
            "node-name": self.cluster.node_name,
            "kubeconfig": str(self.kubeconfig),
            "kubelet-dir": str(self.cluster.kubelet_dir),
            "cdi-dir": str(self.cluster.cdi_dir),
            "sim": str(self.node_file),
            "look-interval": "0.5",
            "reconcile-interval": "2",
            "pod-uid": pod_uid,
            "http-address": f"127.0.0.1:{self.ports[pod_uid]}",
            "mps-socket": str(self.agent.socket),
            **{name.replace("_", "-"): value for name, value in (self.flags | flags).items()},
        }
        with self.log_path.open("ab") as log:
            process = start_driver(
                log,
                *("kubelet-plugin", *(f"--{name}={value}" for name, value in arguments.items())),
                inside=self.inside,
                program=self.program,
            )
        self.processes[pod_uid] = process
        if ready:
            self.wait_ready(pod_uid)
        return process

    def wait_ready(self, pod_uid: str = "", seconds: float = 60) -> None:  # on a busy machine
        """Until /readyz says that a pod with a claim could start here."""
        try:
            wait("the plugin to be ready", lambda: self.ask("/readyz", pod_uid)[0] == 200, seconds)
        except AssertionError as e:
            raise AssertionError(
                f"{e}: {self.ask('/readyz', pod_uid)[1]}\n{self.log[-3000:]}"
            ) from e

    def ask(self, path: str, pod_uid: str = "") -> tuple[int, str]:
        """The status and text of a page of the plugin's HTTP server; 0 where it does not answer."""
        self.check_alive(pod_uid)
        return read_page(self.ports[pod_uid], path)

    def check_alive(self, pod_uid: str = "") -> None:
        process = self.processes[pod_uid]
        if process.poll() is not None:
            raise AssertionError(f"the plugin ended with {process.returncode}:\n{self.log[-3000:]}")

    def stop(self, pod_uid: str = "", how: signal.Signals = signal.SIGTERM) -> float:
        """End a plugin; the seconds that it took."""
        process = self.processes.pop(pod_uid)
        begun = time.monotonic()
        process.send_signal(how)
        process.wait(30)
        return time.monotonic() - begun

    def serve(self, node: str) -> None:
        """Plugin and agent serve the simulated node that *node* describes, instead of theirs."""
        self.stop()
        self.agent.ensure()
        self.agent.stop()
        self.replace_node(node)
        self.agent.start()
        self.start()

    def change(self, node: Document) -> None:
        """Something happens to the simulated node while it is served."""
        self.replace_node(yaml.safe_dump(node))

    def replace_node(self, text: str) -> None:
        """The simulated node is what *text* describes now. Never written in place: who reads
        meanwhile would see a node without GPUs."""
        fresh = self.node_file.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.node_file)

    def kill(self, pod_uid: str = "") -> None:
        self.stop(pod_uid, signal.SIGKILL)

    def stop_all(self) -> None:
        for pod_uid in list(self.processes):
            self.stop(pod_uid)

    def specs(self) -> list[str]:
        """The names of the CDI files of claims."""
        return sorted(path.name for path in self.cluster.cdi_dir.glob(f"k8s.{DRIVER}-claim_*"))

    @property
    def driver_spec(self) -> Path:
        """The CDI file of what every container gets of NVIDIA's driver."""
        return self.cluster.cdi_dir / f"k8s.{DRIVER}-driver_files.json"

    def claims(self) -> list[dict[str, object]]:
        """What `dra-driver claims --ledger-only` says, less the process: this is asked often."""
        settings = ClaimsSettings.model_validate({"kubelet_dir": self.cluster.kubelet_dir})
        answer = json.loads(claims(settings, None, "json", Terminal()))
        assert not answer["unreadable"]
        return list(answer["claims"])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What a command of `dra-driver` says of this node."""
        place = f"--kubelet-dir={self.cluster.kubelet_dir}"
        agent = f"--mps-socket={self.agent.socket}"
        return subprocess.run(
            [sys.executable, "-m", "dra_driver", *arguments, place, agent],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        )

    def smi(self, *arguments: str) -> str:
        """What the nvidia-smi of the simulated host says."""
        program = self.host / "usr/bin/nvidia-smi"
        answer = subprocess.run(
            [program, *arguments], check=True, capture_output=True, text=True, timeout=10
        )
        return answer.stdout

    def metadata(self) -> list[str]:
        """The names of the files in which workloads read of their devices."""
        return sorted(path.name for path in (self.plugin_dir / "metadata").glob("*"))

    def intervals(self) -> dict[str, int]:
        """How many GPUs have which time-slice interval, by what nvidia-smi says."""
        return Counter(re.findall(r"Timeslice +(\w+)", self.smi("compute-policy", "-l")))

    def limits(self) -> dict[str, int]:
        """The memory limits that the simulated driver keeps: cgroup below kubepods to bytes."""
        limits: dict[str, int] = {}
        for directory, _, files in os.walk(self.host / "sys/fs/cgroup"):  # which may go meanwhile
            if "dmem.max" not in files:
                continue
            with contextlib.suppress(FileNotFoundError):
                for line in (Path(directory) / "dmem.max").read_text().splitlines():
                    if (limit := line.split()[1]) != "max":
                        limits[directory.rpartition("kubepods/")[2]] = int(limit)
        return limits

    def instances(self) -> dict[str, list[tuple[int, int, int]]]:
        """The GPU instances that the simulated driver keeps: for the UUID of each GPU with some,
        their profile ids, starts, and how many compute instances each has."""
        by_gpu = {}
        for file in self.host.glob("run/nvidia-simulated/*/*.mig"):
            instances = json.loads(file.read_text())["instances"]
            by_gpu[file.stem] = sorted(
                (instance["profile_id"], instance["start"], len(instance["computes"]))
                for instance in instances
            )
        return {gpu: instances for gpu, instances in by_gpu.items() if instances}

    def layout_state(self) -> str:
        """What the node's label says of the MIG layout."""
        node = self.kube.api.get(f"/api/v1/nodes/{self.cluster.node_name}")
        return str(node["metadata"]["labels"].get("nvidia.com/mig.config.state", ""))

    def allocatable(self) -> dict[str, int]:
        """What the Node says that pods can have of ours, less what it has none of."""
        node = self.kube.api.get(f"/api/v1/nodes/{self.cluster.node_name}")
        return {
            name: int(parse_quantity(count))  # "54k"
            for name, count in node["status"]["allocatable"].items()
            if name.startswith("nvidia.com/") and count != "0"
        }

    def sockets(self) -> list[str]:
        """Those that the kubelet sees: it looks at no hidden name, which a socket has while it is
        made (and for ever where the plugin was killed just then)."""
        return sorted(
            str(path.relative_to(self.cluster.kubelet_dir))
            for directory in (self.plugin_dir, self.registry)
            for path in directory.glob("[!.]*")
            if path.is_socket()
        )
