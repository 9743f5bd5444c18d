"""What the claims of one pod hold of one GPU's memory."""

from collections.abc import Collection
from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.model.devices import GpuUuid


@dataclass(frozen=True, slots=True)
class PodShare:
    """Bytes by claim, for each claim that the pod uses and that holds something of the GPU.

    A claim without a number (None) is not limited: it holds all of the GPU.
    """

    pod: PodUid
    gpu: GpuUuid
    claims: tuple[tuple[ClaimUid, int | None], ...]
    strict: bool = False  # one of them may not be without the driver's own limit

    @property
    def memory_bytes(self) -> int | None:
        """What the pod's processes may use together; None: as much as there is."""
        return self.of({claim for claim, _ in self.claims})

    def of(self, used: Collection[ClaimUid]) -> int | None:
        """What a container may use that uses these claims; None: as much as there is."""
        parts = [held for claim, held in self.claims if claim in used]
        return None if None in parts else sum(held for held in parts if held is not None)
