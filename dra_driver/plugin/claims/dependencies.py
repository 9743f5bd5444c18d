"""What a Preparer works with, and as whom."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from dra_driver.k8s.claims import Claim, ClaimRef, ClaimUid, Pod, PreparedDevice
from dra_driver.k8s.pods import PodSpec
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.gpus import GpuUuid, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, ServedNamespace
from dra_driver.model.offer import Offer
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import GpuSetting, SettingValue, Step
from dra_driver.node.state.claim_files import ClaimFiles
from dra_driver.node.state.ledger import Ledger


class PrepareNode(Protocol):
    """What preparing needs of this machine."""

    def current_setting(self, setting: GpuSetting) -> SettingValue | None: ...
    def carry_out(self, step: Step) -> None: ...
    def serve(self, namespace: MpsNamespace) -> ServedNamespace: ...
    def restore(self, step: Step) -> None: ...
    def driver_files(self) -> DriverFiles: ...
    def device_files(
        self, minors: tuple[int, ...], capabilities: tuple[str, ...] = ()
    ) -> DeviceFiles: ...
    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]: ...
    def instance(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance: ...
    def retry_setting_restores(self) -> bool: ...


class OfferSource(Protocol):
    """What this node offers: as the last look found it, or after another look."""

    def now(self) -> Offer: ...
    def refresh(self) -> Offer: ...


class ClaimSource(Protocol):
    """Where claims are read from."""

    def read(self, ref: ClaimRef) -> Claim: ...


class PodSpecSource(Protocol):
    """Where pods are read from; ``k8s.pods``."""

    def read(self, namespace: str, name: str) -> PodSpec: ...


class InUseChecker(Protocol):
    """Who still uses claims; ``dra_driver.plugin.claims.in_use``. NodeError: it cannot be told."""

    def refuse_while_used(self, record: ClaimRecord) -> None: ...
    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]: ...


class ClaimPreparer(Protocol):
    """Who prepares claims, and unprepares those that are gone; ``plugin.claims.preparer``."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]: ...
    def take_back_if(self, ref: ClaimRef, gone: Callable[[], bool]) -> bool: ...


class NoInUseCheck:
    """Containers end before their claims are given back."""

    def refuse_while_used(self, record: ClaimRecord) -> None:
        """Nobody uses it."""

    def still_using(self, claim: ClaimUid, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        return ()


ClaimChanged = Callable[[ClaimRecord | None], None]
"""Told of a claim that is prepared or not any more: what it holds or held, as far as known."""


def _nobody(record: ClaimRecord | None) -> None:
    """Wants to be told of no claim."""


@dataclass(frozen=True, slots=True)
class PrepareDependencies:
    """What a Preparer works with."""

    node: PrepareNode
    offers: OfferSource
    claims: ClaimSource
    pods: PodSpecSource
    ledger: Ledger
    files: ClaimFiles
    lease: Callable[[float], AbstractContextManager[None]]  # within seconds (rolling update)
    changed: ClaimChanged = _nobody  # told of every claim that was prepared or given back
    users: InUseChecker = field(default_factory=NoInUseCheck)


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """As whom it prepares."""

    driver: str
    pool: str  # the pool that this node publishes
    hook: str | None = None  # the host's path of nvidia-cdi-hook
