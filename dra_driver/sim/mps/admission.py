"""Admission of clients: what the daemon answers a process that wants to connect."""

from collections.abc import Mapping
from typing import Any

from dra_driver.sim.mig.identifiers import capability_minors
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.control_daemon import AdmissionTarget, SimulatedControlDaemon
from dra_driver.sim.mps.host_snapshot import HostGpu
from dra_driver.sim.mps.limits import ServerLimits, grant_limits
from dra_driver.sim.mps.servers import READY, ServedClient, SimulatedNamespace, SimulatedServer


def attach_client(
    control: SimulatedControlDaemon, place: AdmissionTarget, ask: Mapping[str, Any]
) -> dict[str, Any]:
    """Let a process in, as it asks to."""
    uid = int(ask["uid"])
    options = control.options
    if options.protocol == 3 and not options.multiuser and uid != options.uid:
        raise CommandRefused("CUDA_ERROR_NOT_PERMITTED")
    server, namespace = _entrance(control, place, uid)
    control.wait_until_ready(server)
    if not control.has(server) or control.status(server) != READY or server.terminating:
        raise CommandRefused("CUDA_ERROR_MPS_SERVER_NOT_READY")
    client = _client(control, namespace.limits, server, ask)
    control.gone(client.pid)  # wherever else it was
    namespace.clients[client.pid] = client
    control.wakes.watch_client(client.pid)
    return client_row(server, namespace, client)


def _entrance(
    control: SimulatedControlDaemon, place: AdmissionTarget, uid: int
) -> tuple[SimulatedServer, SimulatedNamespace]:
    if place is not None:
        return control.server(place[0]), control.namespace(*place)
    owner = 0 if control.options.multiuser else uid
    name = f"uid_{owner}"
    if control.options.protocol == 2 and name not in control.servers:
        if any(any(server.clients()) for server in control.servers.values()):
            raise CommandRefused(
                "CUDA_ERROR_MPS_SERVER_NOT_READY: the server of another user is busy"
            )
        for server in list(control.servers.values()):
            control.delete_server(server.name, force=False)
    if name not in control.servers:
        control.launch(owner)
    return control.servers[name], control.servers[name].default


def _client(
    control: SimulatedControlDaemon,
    limits: ServerLimits,
    server: SimulatedServer,
    ask: Mapping[str, Any],
) -> ServedClient:
    pid = int(ask["pid"])
    gpus = _visible_gpus(server.gpus, ask)
    if not gpus:
        raise CommandRefused("CUDA_ERROR_NO_DEVICE")
    facts = control.facts()
    for gpu in gpus:
        if len(control.on(gpu, besides=pid)) >= facts.most_clients(gpu):
            raise CommandRefused("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    granted = grant_limits(limits, gpus, ask["environ"], control.options.protocol)
    size = int(ask["memory"])
    for gpu in gpus:
        used = sum(client.memory_bytes for client in control.on(gpu, besides=pid))
        own = granted.memory[gpu.uuid]
        if size > (gpu.memory_bytes if own is None else own) or used + size > gpu.memory_bytes:
            raise CommandRefused("CUDA_ERROR_OUT_OF_MEMORY")
    return ServedClient(pid, int(ask["uid"]), ask["command"], gpus, granted, size)


def client_row(
    server: SimulatedServer, namespace: SimulatedNamespace, client: ServedClient
) -> dict[str, Any]:
    """What holds for a client."""
    sizes = [size for size in client.granted.memory.values() if size is not None]
    return {
        "pid": client.pid,
        "server": server.name,
        "namespace": namespace.name,
        "percent": client.granted.percent,
        "priority": client.granted.priority,
        "memory_bytes": min(sizes, default=None),
        "memory_bytes_by_gpu": dict(client.granted.memory),
    }


def _visible_gpus(gpus: tuple[HostGpu, ...], ask: Mapping[str, Any]) -> tuple[HostGpu, ...]:
    """Those of the server's GPUs that a process has, in its order."""
    with_nodes = [gpu for gpu in gpus if _has_device_nodes(ask, gpu)]
    visible = ask["environ"].get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(with_nodes)
    gpus_seen: list[HostGpu] = []
    for name in visible.split(","):
        ordinal = int(name) if name.isdecimal() else -1
        match = [gpu for i, gpu in enumerate(with_nodes) if ordinal == i or gpu.uuid == name]
        if not match:
            break  # as CUDA does: what follows a wrong one is not seen either
        gpus_seen += match
    return tuple(gpus_seen)


def _has_device_nodes(ask: Mapping[str, Any], gpu: HostGpu) -> bool:
    """Whether a process has the device nodes of *gpu*; an instance has two capabilities besides."""
    minors = ask["minors"]
    if minors is None:
        return True
    caps = () if gpu.instance is None else capability_minors(gpu.minor, *gpu.instance)
    return gpu.minor in minors and {*caps} <= {*ask.get("capabilities", ())}
