"""What a Preparer works with, and as whom."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from dra_driver.kubeletplugin.claims import Claim, ClaimRef, ClaimUid, Pod
from dra_driver.kubeletplugin.pods import PodSpec
from dra_driver.model.devices import GpuUuid
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.holdings import Record
from dra_driver.model.mig import Instance, PartitionKey
from dra_driver.model.mps import Served, Space
from dra_driver.model.offer import Offer
from dra_driver.model.steps import ComputeMode, Interval, Setting, Step
from dra_driver.node.claim_files import ClaimFiles
from dra_driver.node.ledger import Ledger


class Node(Protocol):
    """What preparing needs of this machine."""

    def found(self, setting: Setting) -> Interval | ComputeMode | bool | None: ...
    def carry_out(self, step: Step) -> None: ...
    def serve(self, space: Space) -> Served: ...
    def restore(self, step: Step) -> None: ...
    def driver_files(self) -> DriverFiles: ...
    def device_files(
        self, minors: tuple[int, ...], capabilities: tuple[str, ...] = ()
    ) -> DeviceFiles: ...
    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]: ...
    def instance(self, gpu: GpuUuid, key: PartitionKey) -> Instance: ...
    def put_back(self) -> bool: ...


class Offers(Protocol):
    """What this node offers: as the last look found it, or after another look."""

    def now(self) -> Offer: ...
    def refresh(self) -> Offer: ...


class Claims(Protocol):
    """Where claims are read from."""

    def read(self, ref: ClaimRef) -> Claim: ...


class PodSpecs(Protocol):
    """Where pods are read from; ``kubeletplugin.pod_reader``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...


class Users(Protocol):
    """Who still uses claims; ``dra_driver.plugin.claim_users``. NodeError: it cannot be told."""

    def refuse_while_used(self, record: Record) -> None: ...
    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]: ...


class NoUsers:
    """Containers end before their claims are given back."""

    def refuse_while_used(self, record: Record) -> None:
        """Nobody uses it."""

    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        return ()


Changed = Callable[[Record | None], None]
"""Told of a claim that is prepared or not any more: what it holds or held, as far as known."""


def _nobody(record: Record | None) -> None:
    """Wants to be told of no claim."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a Preparer works with."""

    node: Node
    offers: Offers
    claims: Claims
    pods: PodSpecs
    ledger: Ledger
    files: ClaimFiles
    turn: Callable[[float], AbstractContextManager[None]]  # within seconds (rolling update)
    changed: Changed = _nobody  # told of every claim that was prepared or given back
    users: Users = field(default_factory=NoUsers)


@dataclass(frozen=True, slots=True)
class Names:
    """As whom it prepares."""

    driver: str
    pool: str  # the pool that this node publishes
    hook: str | None = None  # the host's path of nvidia-cdi-hook
