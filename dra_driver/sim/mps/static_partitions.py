"""Static partitions of a GPU's multiprocessors, as far as they can be refused."""

from typing import Final

from dra_driver.base.frozen import frozen
from dra_driver.sim.mps.command_line import (
    CommandRefused,
    ParsedCommand,
    format_table,
    parse_boolean,
    parse_number,
)
from dra_driver.sim.mps.control_daemon import SimulatedControlDaemon
from dra_driver.sim.mps.host_snapshot import HostGpu
from dra_driver.sim.mps.servers import checked_name

MULTIPROCESSORS: Final = 8  # of a chunk; assumed
_AMPERE: Final = (8, 0)


@frozen
class StaticPartition:
    """Chunks of a GPU for one server."""

    name: str
    server: str
    gpu: HostGpu
    chunks: int


class StaticPartitions:
    """The partitions of a daemon's servers. They go with their server."""

    def __init__(self, control: SimulatedControlDaemon) -> None:
        self._control = control
        self._all: list[StaticPartition] = []

    def create(self, words: ParsedCommand) -> str:
        words.allow(1, "server", "device", "chunks", "include-remainder")
        name = checked_name(words.need(0, "name"))
        server = self._control.server(words.option("server"))
        gpu = self._gpu(server.name, words.option("device"))
        chunks = parse_number(words.option("chunks"), "number of chunks")
        parse_boolean(words.options.get("include-remainder", "false"))
        self._refuse(server.name, name, gpu)
        used = sum(partition.chunks for partition in self._here() if partition.gpu.uuid == gpu.uuid)
        free = gpu.multiprocessors // MULTIPROCESSORS - used
        if not 0 < chunks <= free:
            raise CommandRefused(
                f"{chunks} chunks were asked for, and {free} are free on {gpu.uuid}"
            )
        self._all.append(StaticPartition(name, server.name, gpu, chunks))
        return f"CUDA_MPS_SM_PARTITION={gpu.uuid}/{name}"

    def delete(self, words: ParsedCommand) -> str:
        words.allow(1, "server", "device")
        name, server = words.need(0, "name"), words.option("server")
        matching = [
            partition
            for partition in self._here()
            if (partition.name, partition.server) == (name, server)
        ]
        if not matching:
            raise CommandRefused(f"Partition '{name}' does not exist in server '{server}'")
        if self._control.on(matching[0].gpu):
            raise CommandRefused(f"{matching[0].gpu.uuid} has active clients")
        self._all.remove(matching[0])
        return ""

    def list(self, words: ParsedCommand) -> str:
        words.allow(0, "all", "format")
        rows = [
            (partition.name, partition.server, partition.gpu.uuid, str(partition.chunks), "created")
            for partition in self._here()
        ]
        return format_table(words, ("name", "server", "device", "chunks", "status"), rows)

    def _refuse(self, server: str, name: str, gpu: HostGpu) -> None:
        if gpu.capability < _AMPERE:
            raise CommandRefused(f"{gpu.uuid} cannot be partitioned: compute capability below 8.0")
        if self._control.server(server).locality_domains:
            raise CommandRefused(f"Server '{server}' uses locality domains")
        if self._control.on(gpu):
            raise CommandRefused(f"{gpu.uuid} has active clients")
        if any((partition.name, partition.server) == (name, server) for partition in self._here()):
            raise CommandRefused(f"Partition '{name}' exists already in server '{server}'")

    def _gpu(self, server: str, name: str) -> HostGpu:
        for gpu in self._control.server(server).gpus:
            if name in (gpu.uuid, str(gpu.index)):
                return gpu
        raise CommandRefused(f"Server '{server}' has no device '{name}'")

    def _here(self) -> "tuple[StaticPartition, ...]":
        return tuple(server for server in self._all if server.server in self._control.servers)
