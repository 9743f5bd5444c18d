"""Who is let in: what a process that wants to be a client is answered."""

from collections.abc import Mapping
from typing import Any

from dra_driver.node.sim.mig.minors import capabilities
from dra_driver.node.sim.mps.control import Control, Place
from dra_driver.node.sim.mps.facts import Gpu
from dra_driver.node.sim.mps.limits import Limits, granted
from dra_driver.node.sim.mps.refusals import Refused
from dra_driver.node.sim.mps.servers import READY, Client, Namespace, Server


def attach(control: Control, place: Place, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Let a process in, as it asks to."""
    uid = int(ask["uid"])
    options = control.options
    if options.protocol == 3 and not options.multiuser and uid != options.uid:
        raise Refused("CUDA_ERROR_NOT_PERMITTED")
    server, namespace = _entrance(control, place, uid)
    control.wait_until_ready(server)
    if not control.has(server) or control.status(server) != READY or server.terminating:
        raise Refused("CUDA_ERROR_MPS_SERVER_NOT_READY")
    client = _client(control, namespace.limits, server, ask)
    control.gone(client.pid)  # wherever else it was
    namespace.clients[client.pid] = client
    control.wakes.watch_client(client.pid)
    return shown(server, namespace, client)


def _entrance(control: Control, place: Place, uid: int) -> tuple[Server, Namespace]:
    if place is not None:
        return control.server(place[0]), control.namespace(*place)
    owner = 0 if control.options.multiuser else uid
    name = f"uid_{owner}"
    if control.options.protocol == 2 and name not in control.servers:
        if any(any(server.clients()) for server in control.servers.values()):
            raise Refused("CUDA_ERROR_MPS_SERVER_NOT_READY: the server of another user is busy")
        for server in list(control.servers.values()):
            control.delete_server(server.name, force=False)
    if name not in control.servers:
        control.launch(owner)
    return control.servers[name], control.servers[name].default


def _client(control: Control, limits: Limits, server: Server, ask: Mapping[str, Any]) -> Client:
    pid = int(ask["pid"])
    gpus = _seen(server.gpus, ask)
    if not gpus:
        raise Refused("CUDA_ERROR_NO_DEVICE")
    facts = control.facts()
    for gpu in gpus:
        if len(control.on(gpu, besides=pid)) >= facts.most_clients(gpu):
            raise Refused("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED")
    given = granted(limits, gpus, ask["environ"], control.options.protocol)
    size = int(ask["memory"])
    for gpu in gpus:
        used = sum(client.memory_bytes for client in control.on(gpu, besides=pid))
        own = given.memory[gpu.uuid]
        if size > (gpu.memory_bytes if own is None else own) or used + size > gpu.memory_bytes:
            raise Refused("CUDA_ERROR_OUT_OF_MEMORY")
    return Client(pid, int(ask["uid"]), ask["command"], gpus, given, size)


def shown(server: Server, namespace: Namespace, client: Client) -> dict[str, Any]:
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


def _seen(gpus: tuple[Gpu, ...], ask: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """Those of the server's GPUs that a process has, in its order."""
    here = [gpu for gpu in gpus if _has(ask, gpu)]
    wanted = ask["environ"].get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(here)
    found: list[Gpu] = []
    for name in wanted.split(","):
        ordinal = int(name) if name.isdecimal() else -1
        match = [gpu for place, gpu in enumerate(here) if ordinal == place or gpu.uuid == name]
        if not match:
            break  # as CUDA does: what follows a wrong one is not seen either
        found += match
    return tuple(found)


def _has(ask: Mapping[str, Any], gpu: Gpu) -> bool:
    """Whether a process has the device nodes of *gpu*; an instance has two capabilities besides."""
    minors = ask["minors"]
    if minors is None:
        return True
    caps = () if gpu.instance is None else capabilities(gpu.minor, *gpu.instance)
    return gpu.minor in minors and {*caps} <= {*ask.get("capabilities", ())}
