"""A plugin as a process of its own, between a fake kubelet and a fake API server."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra_driver.k8s.claims import ClaimRef
from tests.builders import POOL, claim, claim_document, ref
from tests.driver_process import ROOT, DriverProcess, Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.poison import own_host
from tests.pages import read_page


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        put_node(server)
        put_device_class(server)
        yield server


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: names of sockets have to fit."""
    with tempfile.TemporaryDirectory(prefix="dra", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def start(server: ApiServer, home: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(source: Path | None = None, **flags: str) -> Process:
        """*source*: where that of a release is, which is run as a program of its own."""
        arguments = {
            "node-name": POOL,
            "kubeconfig": str(server.kubeconfig(home / "kubeconfig")),
            "kubelet-dir": str(home / "kubelet"),
            "cdi-dir": str(home / "cdi"),
            "device-plugin-dir": str(home / "device-plugins"),
            "host-root": str(own_host(home / "host")),
            "mps-socket": str(home / "agent.sock"),
            "sim": "h100x8",
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        words = ["kubelet-plugin", *(f"--{name}={value}" for name, value in arguments.items())]
        started.append(
            whole_process(*words, source=source)
            if source
            else DriverProcess(*words, errors=subprocess.PIPE)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def whole_process(*words: str, source: Path = ROOT) -> Process:
    """A command of the driver from its start to its end, which a fork begins late and cuts short:
    no ``atexit``, no finalisation of the interpreter."""
    return subprocess.Popen(
        [sys.executable, "-m", "dra_driver", *words],
        stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"]},
        cwd=source,
    )


@pytest.fixture
def kubelet(home: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(home / "kubelet") as kubelet:
        yield kubelet


def put_node(server: ApiServer, kubelet: str = "v1.36.3", **metadata: object) -> None:
    """The Node of the plugin, with the status that it has; a new one with such a *kubelet*."""
    nodes = server.objects("nodes")
    new = {"nodeInfo": {"kubeletVersion": kubelet}}
    status = (nodes[0].get("status") or {}) if nodes else new
    server.put({"kind": "Node", "metadata": {"name": POOL, **metadata}, "status": status})


def put_device_class(server: ApiServer, resource: str = "nvidia.com/gpu") -> None:
    """The DeviceClass of the chart, by which pods that ask for *resource* get claims."""
    spec = {"extendedResourceName": resource} if resource else {}
    server.put({"kind": "DeviceClass", "metadata": {"name": "gpu.nvidia.com"}, "spec": spec})


def put(server: ApiServer, *devices: str, name: str = "claim", **fields: object) -> ClaimRef:
    """Put an allocated claim onto the API server."""
    document = claim_document(claim(*devices, name=name, **fields))  # type: ignore[arg-type]
    stored = server.put(document)
    return ref(name, stored["metadata"]["uid"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def readiness(port: int) -> tuple[int, str]:
    """The status and text of /readyz of the plugin there; 0 where it does not answer."""
    return read_page(port, "/readyz")
