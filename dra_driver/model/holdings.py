"""Who holds what: one holding per claim and device, or per share of a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimRef, PreparedDevice, ShareId
from dra_driver.model.devices import DeviceName
from dra_driver.model.steps import Step


@dataclass(frozen=True, slots=True)
class Holding:
    """What one claim holds of one device."""

    claim: ClaimRef
    device: DeviceName
    share: ShareId | None = None
    consumed: tuple[tuple[str, str], ...] = ()  # (capacity, quantity); empty: all of it
    admin: bool = False  # looks on, takes nothing away


Held = Mapping[DeviceName, Sequence[Holding]]


@dataclass(frozen=True, slots=True)
class Record:
    """What the ledger knows of a claim.

    *prepared* and *spec* (the text of its CDI file) are there once the claim is completed; a record
    without them is of a claim whose preparation began and may have touched the node.
    """

    claim: ClaimRef
    holdings: tuple[Holding, ...]
    steps: tuple[Step, ...] = ()
    prepared: tuple[PreparedDevice, ...] | None = None
    spec: str | None = None

    @property
    def completed(self) -> bool:
        return self.prepared is not None
