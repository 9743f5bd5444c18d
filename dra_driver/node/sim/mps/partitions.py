"""Static partitions of a GPU's multiprocessors, as far as they can be refused."""

from dataclasses import dataclass
from typing import Final

from dra_driver.node.sim.mps.control import Control
from dra_driver.node.sim.mps.facts import Gpu
from dra_driver.node.sim.mps.options import Words, boolean, number
from dra_driver.node.sim.mps.refusals import Refused
from dra_driver.node.sim.mps.servers import checked_name
from dra_driver.node.sim.mps.tables import drawn

MULTIPROCESSORS: Final = 8  # of a chunk; assumed
_AMPERE: Final = (8, 0)


@dataclass(frozen=True, slots=True)
class Partition:
    """Chunks of a GPU for one server."""

    name: str
    server: str
    gpu: Gpu
    chunks: int


class Partitions:
    """The partitions of a daemon's servers. They go with their server."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._all: list[Partition] = []

    def create(self, words: Words) -> str:
        words.allow(1, "server", "device", "chunks", "include-remainder")
        name = checked_name(words.need(0, "name"))
        server = self._control.server(words.option("server"))
        gpu = self._gpu(server.name, words.option("device"))
        chunks = number(words.option("chunks"), "number of chunks")
        boolean(words.options.get("include-remainder", "false"))
        self._refuse(server.name, name, gpu)
        used = sum(one.chunks for one in self._here() if one.gpu.uuid == gpu.uuid)
        free = gpu.multiprocessors // MULTIPROCESSORS - used
        if not 0 < chunks <= free:
            raise Refused(f"{chunks} chunks were asked for, and {free} are free on {gpu.uuid}")
        self._all.append(Partition(name, server.name, gpu, chunks))
        return f"CUDA_MPS_SM_PARTITION={gpu.uuid}/{name}"

    def delete(self, words: Words) -> str:
        words.allow(1, "server", "device")
        name, server = words.need(0, "name"), words.option("server")
        found = [one for one in self._here() if (one.name, one.server) == (name, server)]
        if not found:
            raise Refused(f"Partition '{name}' does not exist in server '{server}'")
        if self._control.on(found[0].gpu):
            raise Refused(f"{found[0].gpu.uuid} has active clients")
        self._all.remove(found[0])
        return ""

    def list(self, words: Words) -> str:
        words.allow(0, "all", "format")
        rows = [
            (one.name, one.server, one.gpu.uuid, str(one.chunks), "created") for one in self._here()
        ]
        return drawn(words, ("name", "server", "device", "chunks", "status"), rows)

    def _refuse(self, server: str, name: str, gpu: Gpu) -> None:
        if gpu.capability < _AMPERE:
            raise Refused(f"{gpu.uuid} cannot be partitioned: compute capability below 8.0")
        if self._control.server(server).locality_domains:
            raise Refused(f"Server '{server}' uses locality domains")
        if self._control.on(gpu):
            raise Refused(f"{gpu.uuid} has active clients")
        if any((one.name, one.server) == (name, server) for one in self._here()):
            raise Refused(f"Partition '{name}' exists already in server '{server}'")

    def _gpu(self, server: str, name: str) -> Gpu:
        for gpu in self._control.server(server).gpus:
            if name in (gpu.uuid, str(gpu.index)):
                return gpu
        raise Refused(f"Server '{server}' has no device '{name}'")

    def _here(self) -> "tuple[Partition, ...]":
        return tuple(one for one in self._all if one.server in self._control.servers)
