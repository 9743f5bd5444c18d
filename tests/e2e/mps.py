"""Clients of MPS in end-to-end tests, and what containers are told of it."""

import json

from tests.e2e.driver import Driver
from tests.e2e.kube import Kube, wait


def mps_variables(
    kube: Kube, name: str, container: str = "main", namespace: str = "default"
) -> dict[str, str]:
    """What a container was told of MPS."""

    def variables() -> dict[str, str]:
        lines = kube.logs(name, container, namespace).splitlines()
        return dict(line.split("=", 1) for line in lines if line.startswith("CUDA_MPS_"))

    return wait(f"what {name} was told", variables, 20)


def attached(driver: Driver, pid: int, *more: str) -> dict[str, int]:
    """A process becomes a client: the limits that hold for it."""
    answer = driver.agent.client("attach", pid, *more)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    shown = driver.agent.client("show", pid, "-o", "json")
    assert shown.returncode == 0, shown.stderr + shown.stdout
    return json.loads(shown.stdout)


def alive(driver: Driver, *pids: int) -> bool:
    """Whether these processes are clients of some server."""
    clients = {client.pid for server in driver.agent.status().servers for client in server.clients}
    return set(pids) <= clients
