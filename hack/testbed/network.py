"""The addresses and ports of the cluster."""

import socket

# Hosts reach pods and pods each other over one bridge; nothing leaves the machine.
BRIDGE = "dra-testbed0"
POD_CIDR = "10.253.0.0/16"
SERVICE_CIDR = "10.254.0.0/16"
SERVICE_ADDRESS = "10.254.0.1"
DNS_ADDRESS = "10.254.0.10"

# Below the range the kernel takes ports for outgoing connections from (32768): while a component
# is stopped, nobody gets its port by chance.
FIRST_PORT = 21000
LAST_PORT = 31000

PORT_NAMES = (
    "apiserver",
    "etcd",
    "etcd-peer",
    "controller-manager",
    "scheduler",
    "kubelet",
    "kubelet-health",
)


def choose_ports(first: int = FIRST_PORT) -> dict[str, int]:
    """A free port on loopback for each name, from *first* on; the same ones again, as a rule."""
    chosen: dict[str, int] = {}
    candidates = iter(range(first, LAST_PORT))
    for name in PORT_NAMES:
        chosen[name] = next(port for port in candidates if _free(port))
    return chosen


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
