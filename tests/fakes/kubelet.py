"""The kubelet's side of a DRA plugin: real gRPC over real unix sockets, and its rules about both.

It finds plugins in ``<directory>/plugins_registry`` as the kubelet does, registers and forgets
them, keeps one connection per instance, and refuses answers that the kubelet refuses::

    with FakeKubelet(directory, minor=36) as kubelet:
        kubelet.wait_for_plugin("gpu.example.com")
        devices = kubelet.prepare([ref])[ref.uid]      # KubeletError: what a pod event would say
        answers = kubelet.ask("prepare", [ref])        # the bare answer, errors included
        kubelet.forget()                               # as after a restart: prepare calls again
        kubelet.unprepare([ref])
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice, ShareId
from tests.fakes.plugins import Instance, KubeletError, Plugins

__all__ = ["CALL_SECONDS", "Answer", "FakeKubelet", "Instance", "KubeletError"]

CALL_SECONDS = 45.0  # pkg/kubelet/cm/dra: the deadline of one call
_CDI_NAME = re.compile(r"[A-Za-z][\w.-]*/[A-Za-z][\w-]*=[\w.:-]+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plugin said about one claim."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""


@dataclass
class _Cached:
    uid: ClaimUid
    devices: tuple[PreparedDevice, ...] = ()
    prepared: bool = False


class FakeKubelet:
    """A kubelet of Kubernetes 1.*minor* with its files in *directory* (keep that path short)."""

    def __init__(self, directory: Path, minor: int = 36, poll_seconds: float = 0.01) -> None:
        self.plugins = directory / "plugins"
        self.registry = directory / "plugins_registry"
        self.minor = minor
        self._watched = Plugins(self.registry, minor, poll_seconds)
        self._claims: dict[tuple[str, str], _Cached] = {}

    def __enter__(self) -> "FakeKubelet":
        for directory in (self.plugins, self.registry):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._watched.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.close()

    @property
    def refusals(self) -> list[str]:
        """Why a registration failed, oldest first."""
        return self._watched.refusals

    def look_seldom(self, seconds: float) -> None:
        """Look for plugins once in so many seconds from now on. The real one: once a second."""
        self._watched.poll_seconds = seconds

    def instances(self, driver: str) -> tuple[Instance, ...]:
        """The registered processes of *driver*, oldest first."""
        return self._watched.instances(driver)

    def wait_for_plugin(self, driver: str, count: int = 1, seconds: float = 60.0) -> Instance:
        """The newest instance, once *count* of them are registered and connected."""

        def ready() -> bool:
            return sum(i.connected for i in self.instances(driver)) == count

        self._watched.wait_until(ready, f"{count} connected instances of {driver}", seconds)
        return self.instances(driver)[-1]

    def wait_until_gone(self, driver: str, seconds: float = 60.0) -> None:
        """Wait until no instance of *driver* is registered."""
        self.wait_until(lambda: not self.instances(driver), f"{driver} to deregister", seconds)

    def wait_until(self, ready: Callable[[], bool], condition: str, seconds: float = 60.0) -> None:
        """Wait for something that comes by itself, with the registrations at rest."""
        self._watched.wait_until(ready, condition, seconds)

    def ask(
        self,
        operation: str,
        refs: Sequence[ClaimRef],
        driver: str | None = None,
        timeout: float = CALL_SECONDS,
    ) -> dict[ClaimUid, Answer]:
        """The plugin's bare answer to "prepare" or "unprepare"; grpc.RpcError as it comes."""
        response = self._watched.usable(driver).call(operation.capitalize(), refs, timeout)
        return {
            ClaimUid(uid): Answer(
                tuple(self._device(d) for d in getattr(entry, "devices", ())), entry.error
            )
            for uid, entry in response.claims.items()
        }

    def prepare(
        self, refs: Sequence[ClaimRef], driver: str | None = None
    ) -> dict[ClaimUid, tuple[PreparedDevice, ...]]:
        """Prepare a pod's claims: one call with those that are not prepared yet.

        Devices of a claim add up over calls, as in the kubelet, where an answer comes twice.
        """
        claims = [self._cached(ref) for ref in refs]
        todo = [ref for ref, cached in zip(refs, claims, strict=True) if not cached.prepared]
        if todo:
            answers = self._checked("prepare", todo, driver)
            for cached in claims:
                if cached.uid in answers and not answers[cached.uid].error:
                    cached.devices += answers[cached.uid].devices
            self._refuse("NodePrepareResources", todo, answers)
        for cached in claims:
            cached.prepared = True
        return {cached.uid: cached.devices for cached in claims}

    def unprepare(self, refs: Sequence[ClaimRef], driver: str | None = None) -> None:
        """Unprepare claims and forget them; known or not, as after a restart with a checkpoint."""
        self._refuse("NodeUnprepareResources", refs, self._checked("unprepare", refs, driver))
        for ref in refs:
            self._claims.pop((ref.namespace, ref.name), None)

    def forget(self) -> None:
        """Restart: claims are known from the checkpoint, that they are prepared is not."""
        for cached in self._claims.values():
            cached.prepared, cached.devices = False, ()

    def _cached(self, ref: ClaimRef) -> _Cached:
        cached = self._claims.setdefault((ref.namespace, ref.name), _Cached(ref.uid))
        if cached.uid != ref.uid:
            raise KubeletError(
                f"old ResourceClaim with same name {ref} and different UID {cached.uid} "
                "still exists"
            )
        return cached

    def _checked(
        self, operation: str, refs: Sequence[ClaimRef], driver: str | None
    ) -> dict[ClaimUid, Answer]:
        try:
            answers = self.ask(operation, refs, driver)
        except grpc.RpcError as error:
            raise KubeletError(f"{operation}: {error.code().name}: {error.details()}") from error
        expected = {ref.uid for ref in refs}
        if unknown := sorted(answers.keys() - expected):
            raise KubeletError(f"returned result for unknown claim UID {', '.join(unknown)}")
        if missing := sorted(expected - answers.keys()):
            raise KubeletError(f"{operation} skipped {len(missing)} ResourceClaims: {missing}")
        return answers

    def _refuse(self, call: str, refs: Sequence[ClaimRef], answers: dict[ClaimUid, Answer]) -> None:
        errors = [f"{ref}: {answers[ref.uid].error}" for ref in refs if answers[ref.uid].error]
        if errors:
            raise KubeletError(f"{call} failed for ResourceClaim {'; '.join(errors)}")

    def _device(self, device: Any) -> PreparedDevice:
        if slashed := [name for name in device.request_names if "/" in name]:
            raise KubeletError(f"request names {slashed} would match no container's claim request")
        if bad := [name for name in device.cdi_device_ids if not _CDI_NAME.fullmatch(name)]:
            raise KubeletError(f"CDI device names {bad} are not vendor/class=name")
        # 1.34 has no such field yet, and v1beta1 never gets it.
        shared = self.minor >= 35 and hasattr(device, "share_id") and device.HasField("share_id")
        return PreparedDevice(
            requests=tuple(device.request_names),
            pool=device.pool_name,
            device=device.device_name,
            cdi_ids=tuple(device.cdi_device_ids),
            share=ShareId(device.share_id) if shared else None,
        )
