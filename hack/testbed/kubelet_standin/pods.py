"""One pod from bound to gone: claims prepared, containers run, claims unprepared, status told."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.base.errors import ApiServerError, Conflict, NotFound, TimedOut
from dra_driver.k8s.claims import ClaimRef, ClaimUid
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient
from hack.testbed.kubelet_standin.claims import (
    Devices,
    NotYet,
    PodClaim,
    cdi_names,
    claim_ref,
    drivers,
    pod_claims,
)
from hack.testbed.kubelet_standin.containers import Ended, Run, configuration
from hack.testbed.kubelet_standin.events import warning
from hack.testbed.kubelet_standin.node import now
from hack.testbed.kubelet_standin.shared_claims import SharedClaims
from tests.fakes.plugins import KubeletError

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_ANNOTATION = "standin.dra.test"
_ANNOTATED = 4000  # characters of output


@dataclass(frozen=True, slots=True)
class PodHost:
    """What pods run with, and where."""

    api: ApiClient
    claims: SharedClaims
    pods: Path
    cdi: Path
    delete_now: Callable[[str, str, str], None]  # namespace, name, UID


class Pod:
    """Carries one pod through its life, in a thread."""

    def __init__(self, host: PodHost, document: Mapping[str, Any]) -> None:
        self._host = host
        self._pod = document
        self._uid = str(document["metadata"]["uid"])
        self._refs: tuple[ClaimRef, ...] = ()
        self._runs: list[Run] = []
        self._guard = threading.Lock()
        self._ending = False
        self._deleted = threading.Event()
        self._started_at = now()
        self._thread = threading.Thread(target=self._live, name=f"pod {self._uid}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> tuple[str, str]:
        """Namespace and name."""
        return self._pod["metadata"]["namespace"], self._pod["metadata"]["name"]

    def output(self, container: str) -> Path:
        """Where what *container* prints goes."""
        return self._host.pods / self._uid / container / "output"

    def delete(self) -> None:
        """Somebody deletes the pod: end what runs, and it."""
        if not self._deleted.is_set():
            self._deleted.set()
            self.end()

    def end(self) -> None:
        """End what runs, now and later."""
        with self._guard:
            self._ending = True
            for run in self._runs:
                run.stop()

    def join(self, seconds: float) -> None:
        """Wait until no process of it runs."""
        deadline = time.monotonic() + seconds
        for run in self._runs:
            run.over.wait(max(0.0, deadline - time.monotonic()))

    @property
    def _path(self) -> str:
        metadata = self._pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    @property
    def _events(self) -> str:
        return f"/api/v1/namespaces/{self._pod['metadata']['namespace']}/events"

    def _live(self) -> None:
        facts = {"pod": self._path, "uid": self._uid}
        try:
            self._run_once()
        except NotFound:
            log.info("the pod went away", extra=facts)
        except Exception:  # one pod's trouble must not end the node
            log.exception("the pod got stuck", extra=facts)
            self._tell({"phase": "Failed", "message": "the stand-in kubelet failed: see its log"})
        self._until_done(self._unprepare)
        self._deleted.wait()
        metadata = self._pod["metadata"]
        self._until_done(
            lambda: self._host.delete_now(metadata["namespace"], metadata["name"], self._uid)
        )

    def _run_once(self) -> None:
        if (self._pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return
        claims = self._prepared()
        if claims is None:
            return
        ended = self._containers("initContainers", *claims)
        if all(end.exit_code == 0 for end in ended.values()):
            self._tell(self._running())
            ended = self._containers("containers", *claims)
        self._until_done(self._unprepare)  # before the terminal status: SyncTerminatingPod
        self._report(ended)

    def _prepared(self) -> tuple[Sequence[tuple[PodClaim, ClaimUid]], Devices] | None:
        """The pod's claims and their devices; None: deleted before they were there."""
        reason = ""
        while not self._deleted.is_set():
            try:
                return self._prepare()
            except (NotYet, KubeletError, ApiServerError, TimedOut) as error:
                if str(error) != reason and not self._deleted.is_set():
                    reason = str(error)
                    log.info("the pod waits: %s", reason, extra={"pod": self._path})
                    self._wait_because(reason)
            self._deleted.wait(_RETRY_SECONDS)
        return None

    def _prepare(self) -> tuple[Sequence[tuple[PodClaim, ClaimUid]], Devices]:
        document = self._host.api.get(self._path)
        if document["metadata"]["uid"] != self._uid:
            self._deleted.set()
            raise NotYet("the pod is gone, and another one has its name")
        self._pod = document
        namespace = self._pod["metadata"]["namespace"]
        claims, requested = [], []
        for entry in pod_claims(self._pod):
            path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{entry.claim}"
            claim = self._host.api.get(path)
            ref = claim_ref(claim, self._pod)
            claims.append((entry, ref.uid))
            requested.append((ref, drivers(claim)))
        self._refs = tuple(ref for ref, _ in requested)
        return claims, self._host.claims.prepare(self._uid, requested)

    def _containers(
        self, field: str, claims: Sequence[tuple[PodClaim, ClaimUid]], devices: Devices
    ) -> dict[str, Ended]:
        """Run them: init containers one after the other, the others side by side."""
        ended: dict[str, Ended] = {}

        def end(container: Mapping[str, Any]) -> None:
            name = container["name"]
            ended[name] = self._run(container, cdi_names(container, claims, devices))

        documents = self._pod["spec"].get(field) or ()
        if field == "initContainers":
            for container in documents:
                end(container)
                if ended[container["name"]].exit_code:
                    break
            return ended
        threads = [threading.Thread(target=end, args=(c,), daemon=True) for c in documents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ended

    def _run(self, container: Mapping[str, Any], names: Sequence[str]) -> Ended:
        directory = self._host.pods / self._uid / container["name"]
        run = Run(directory, configuration(container, self._pod), names, self._host.cdi)
        with self._guard:
            self._runs.append(run)
            if self._ending:
                run.stop()
        return run.wait()

    def _unprepare(self) -> None:
        self._host.claims.unprepare(self._uid, self._refs)

    def _until_done(self, work: Callable[[], None]) -> None:
        while True:
            try:
                return work()
            except (NotFound, Conflict):  # the pod is gone; or another has its name now
                return None
            except (KubeletError, ApiServerError) as error:
                log.warning("trying again: %s", error, extra={"pod": self._path})
                threading.Event().wait(_RETRY_SECONDS)

    def _wait_because(self, reason: str) -> None:
        waiting = {"waiting": {"reason": "ContainerCreating", "message": reason}}
        statuses = [
            _status(c, waiting, started=False) for c in self._pod["spec"].get("containers") or ()
        ]
        self._tell({"phase": "Pending", "containerStatuses": statuses})
        self._until_done(
            lambda: _ignore(self._host.api.create(self._events, warning(self._pod, reason)))
        )

    def _running(self) -> dict[str, Any]:
        state = {"running": {"startedAt": now()}}
        return {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now()}],
            "containerStatuses": [
                _status(c, state) | {"ready": True} for c in self._pod["spec"]["containers"]
            ],
        }

    def _report(self, ended: Mapping[str, Ended]) -> None:
        output = {f"{_ANNOTATION}/{name}": end.output[-_ANNOTATED:] for name, end in ended.items()}
        self._until_done(
            lambda: _ignore(
                self._host.api.patch(
                    self._path, {"metadata": {"uid": self._uid, "annotations": output}}
                )
            )
        )
        statuses = [
            _status(c, {"terminated": self._terminated(ended[c["name"]])})
            for c in self._pod["spec"]["containers"]
            if c["name"] in ended
        ]
        failed = any(end.exit_code for end in ended.values())
        phase = "Failed" if failed else "Succeeded"
        ended_too = {"type": "Ready", "status": "False", "reason": "PodCompleted"}
        self._tell({"phase": phase, "conditions": [ended_too], "containerStatuses": statuses})

    def _terminated(self, end: Ended) -> dict[str, Any]:
        return {
            "exitCode": end.exit_code,
            "reason": end.reason,
            "message": end.output[-1024:] if end.exit_code else "",
            "startedAt": self._started_at,
            "finishedAt": now(),
        }

    def _tell(self, status: dict[str, Any]) -> None:
        status = {"startTime": self._started_at, **status}
        self._until_done(
            lambda: _ignore(
                self._host.api.patch(
                    f"{self._path}/status",
                    {"metadata": {"uid": self._uid}, "status": status},  # never of a namesake
                    content_type=STRATEGIC_MERGE_PATCH,
                )
            )
        )


def _status(
    container: Mapping[str, Any], state: dict[str, Any], started: bool = True
) -> dict[str, Any]:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "started": started,
        "state": state,
    }


def _ignore(_: object) -> None:
    """For calls whose answer nobody needs."""
