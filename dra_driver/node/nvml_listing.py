"""What was learned of GPUs since NVML was started, and holds until it is started again."""

from dra_driver.errors import NodeError, Vanished
from dra_driver.model.uuids import GpuUuid, is_instance
from dra_driver.node.mig.geometry import Geometries
from dra_driver.node.nvml_values import Glance


class Listing:
    """Where NVML lists GPUs and their MIG instances, as far as they were looked at.

    Only for whoever holds NVML's gate.
    """

    def __init__(self) -> None:
        self.geometries = Geometries()
        self._indices: dict[GpuUuid, int] = {}

    def index(self, uuid: GpuUuid) -> int | None:
        """Where NVML lists this GPU, or the GPU of this instance."""
        return self._indices.get(uuid)

    def seen(self, index: int, glance: Glance) -> None:
        """What is there no more is forgotten."""
        for uuid in [uuid for uuid, known in self._indices.items() if known == index]:
            del self._indices[uuid]
        self._indices[glance.uuid] = index
        self._indices |= {one.uuid: index for one in glance.instances}


def named(gpu: GpuUuid) -> str:
    """How a GPU, or an instance of one, is called in messages."""
    return gpu if is_instance(gpu) else f"GPU {gpu}"


def not_listed(gpu: GpuUuid, doing: str) -> NodeError:
    """What is raised where NVML does not list it."""
    error = Vanished if is_instance(gpu) else NodeError
    return error(f"{named(gpu)}, {doing}: NVML does not list it")
