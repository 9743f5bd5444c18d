"""The gRPC services for the kubelet: registration, and DRA with one answer per claim.

The kubelet watches its registry directory; behind a new socket it asks GetInfo, and says with
NotifyRegistrationStatus what came of it. It does so again after each of its own restarts.

One implementation of the DRA service serves v1 (Kubernetes 1.34 and newer) and v1beta1 (1.32 and
newer). gRPC gives each call a thread, which serves the call's first claim; the others have threads
of their own. Every claim is served in its own ``try``: a bad claim must not fail its neighbours,
and one that waits for its device must not hold up others.
"""

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import grpc

from api.kubelet import dra_v1_pb2, dra_v1beta1_pb2
from api.kubelet import registration_v1_pb2 as messages
from dra_driver.base.errors import ClaimError, DriverError, NodeError, TimedOut
from dra_driver.base.frozen import frozen
from dra_driver.base.threads import NamedLocks, StandingThreads, after_call
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
REGISTRATION_SERVICE = str(messages.DESCRIPTOR.services_by_name["Registration"].full_name)


class RegistrationService:
    """Tells the kubelet which plugin this is, and keeps its last answer."""

    def __init__(self, driver: str, endpoint: str, versions: tuple[str, ...]) -> None:
        self._plugin = messages.PluginInfo(
            type=PLUGIN_TYPE, name=driver, endpoint=endpoint, supported_versions=versions
        )
        self._registered = False

    def add_versions(self, versions: Iterable[str]) -> None:
        """Name further services to the kubelet, after those that it chooses from."""
        self._plugin.supported_versions.extend(versions)

    @property
    def registered(self) -> bool:
        """Whether the kubelet accepted us the last time it said something."""
        return self._registered

    def socket_lost(self) -> None:
        """The kubelet forgets a plugin with its socket, and says when it has found the new one."""
        self._registered = False

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The gRPC service."""
        return (
            grpc.method_handlers_generic_handler(
                REGISTRATION_SERVICE,
                {
                    "GetInfo": grpc.unary_unary_rpc_method_handler(
                        self._get_info,
                        request_deserializer=messages.InfoRequest.FromString,
                        response_serializer=messages.PluginInfo.SerializeToString,
                    ),
                    "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                        self._notified,
                        request_deserializer=messages.RegistrationStatus.FromString,
                        response_serializer=messages.RegistrationStatusResponse.SerializeToString,
                    ),
                },
            ),
        )

    def _get_info(self, _request: Any, _context: Any) -> messages.PluginInfo:
        return self._plugin

    def _notified(
        self, status: messages.RegistrationStatus, _context: Any
    ) -> messages.RegistrationStatusResponse:
        # Never answered with an error: the kubelet would drop a registration that worked, and
        # after one that did not it asks again in any case.
        self._registered = status.plugin_registered
        facts = {"driver": self._plugin.name, "endpoint": self._plugin.endpoint}
        if status.plugin_registered:
            log.info("the kubelet registered us", extra=facts)
        else:
            log.error("the kubelet refused to register us: %s", status.error, extra=facts)
        return messages.RegistrationStatusResponse()


# The kubelet gives up after 45 s and may ask again while its first call still runs here.
CALL_TIMEOUT_SECONDS = 40.0
MAX_CONCURRENT_CLAIMS = 64  # prepared in parallel; the others queue
# A prepare that queues keeps the thread of its call. So that calls which wait, for each other or
# for an API server that hangs, never take all threads, those beyond a bound are refused; above it
# threads are left for unprepares, which prepares may wait for, and for empty calls (the liveness
# check). It is far above the 110 pods that the kubelet allows by default.
MAX_WAITING_CLAIMS = 256
MAX_CALLS = MAX_WAITING_CLAIMS + 128

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it becomes part of file names


class ClaimHandler(Protocol):
    """Prepares and unprepares one claim; called again after a failure, a restart, a lost answer."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable and say which; asked again, the same answer."""

    def unprepare(self, ref: ClaimRef) -> None:
        """Undo it; a claim that was never prepared is no error."""


class CallObserver(Protocol):
    """Counts the claims that were served, for metrics."""

    def observe(self, operation: str, outcome: str, seconds: float) -> None:
        """One claim served.

        *operation*: prepare, unprepare. *outcome*: ok, refused (the claim is at fault), failed
        (the node or the cluster is), crashed (we are).
        """


@frozen
class DraServiceVersion:
    """One version of the kubelet's service: its messages, and what they can say."""

    name: str  # as GetInfo lists it: the last part of the package and the service
    messages: ModuleType
    share_ids: bool

    @property
    def service(self) -> str:
        """Its name on the wire."""
        return str(self.messages.DESCRIPTOR.services_by_name["DRAPlugin"].full_name)


# Newest first: from Kubernetes 1.34 on the kubelet takes the first of the list that it knows.
DRA_SERVICE_VERSIONS = (
    DraServiceVersion("v1.DRAPlugin", dra_v1_pb2, share_ids=True),
    DraServiceVersion("v1beta1.DRAPlugin", dra_v1beta1_pb2, share_ids=False),
)


@frozen
class ClaimResponse:
    """The answer for one claim; with an error it was not served."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""


class DraService:
    """Serves the kubelet's calls for *driver*."""

    def __init__(
        self,
        driver: ClaimHandler,
        observer: CallObserver,
        patience_seconds: float = CALL_TIMEOUT_SECONDS,
        max_concurrent: int = MAX_CONCURRENT_CLAIMS,
        max_waiting: int = MAX_WAITING_CLAIMS,
    ) -> None:
        self._driver = driver
        self._observer = observer
        self._patience_seconds = patience_seconds
        self._claims = NamedLocks(
            "claim {name} is still being served for an earlier call, {seconds} s "
            "later; the kubelet will ask again"
        )
        self._places = threading.Semaphore(max_concurrent)
        self._queue = threading.Semaphore(max_waiting)
        self._threads = StandingThreads("claim", max_concurrent)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The gRPC services, one per version; gRPC answers any other with UNIMPLEMENTED."""
        return tuple(
            grpc.method_handlers_generic_handler(
                version.service,
                {
                    "NodePrepareResources": self._method(version, "Prepare"),
                    "NodeUnprepareResources": self._method(version, "Unprepare"),
                },
            )
            for version in DRA_SERVICE_VERSIONS
        )

    def _method(self, version: DraServiceVersion, verb: str) -> "grpc.RpcMethodHandler[Any, Any]":
        request = getattr(version.messages, f"Node{verb}ResourcesRequest")
        response = getattr(version.messages, f"Node{verb}ResourcesResponse")

        def call(message: Any, context: grpc.ServicerContext) -> Any:
            try:
                answers = self._serve_all(verb.lower(), _refs(message))
                return _fill(response(), answers, version)
            except Exception:  # the process has to live on, and the kubelet asks again
                log.exception("call failed", extra={"method": f"Node{verb}Resources"})
                context.abort(grpc.StatusCode.INTERNAL, "internal error: see the plugin's log")

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    def _serve_all(self, operation: str, refs: Sequence[ClaimRef]) -> dict[ClaimUid, ClaimResponse]:
        """Serve *refs* to their end, even if the kubelet gives up meanwhile.

        A claim for which no thread is free by then is served here.
        """
        others = {ref: self._threads.submit(self._serve, operation, ref) for ref in refs[1:]}
        answers = {ref.uid: self._serve(operation, ref) for ref in refs[:1]}
        for ref, answer in others.items():
            is_ours = answer.cancel()
            answers[ref.uid] = self._serve(operation, ref) if is_ours else answer.result()
        return answers

    def _serve(self, operation: str, ref: ClaimRef) -> ClaimResponse:
        begun = time.monotonic()
        failure: Exception | None = None
        try:
            answer, outcome = self._ask(operation, ref), "ok"
        except DriverError as error:
            failure, answer = error, ClaimResponse(error=error.public)
            outcome = "refused" if isinstance(error, ClaimError) else "failed"
        except Exception as error:  # noqa: BLE001 - one claim's trouble must stay with that claim
            failure, outcome = error, "crashed"
            answer = ClaimResponse(error=f"internal error: {type(error).__name__}: {error}")
        seconds = time.monotonic() - begun
        after_call(partial(self._tell, operation, ref, outcome, seconds, failure))
        return answer

    def _tell(
        self, operation: str, ref: ClaimRef, outcome: str, seconds: float, failure: Exception | None
    ) -> None:
        """Once the kubelet has its answer: a line takes as long as a tenth of a prepare."""
        _log(operation, ref, outcome, seconds, failure)
        self._observer.observe(operation, outcome, seconds)

    def _ask(self, operation: str, ref: ClaimRef) -> ClaimResponse:
        if not _UID.fullmatch(ref.uid):
            raise ClaimError(
                f"claim {ref} has the UID {ref.uid!r}, which no Kubernetes object can have"
            )
        name = f"{ref} (UID {ref.uid})"
        if operation == "unprepare":
            with self._claims.hold([name], self._patience_seconds):
                self._driver.unprepare(ref)
                return ClaimResponse()
        with self._place(name), self._claims.hold([name], self._patience_seconds):
            return ClaimResponse(tuple(self._driver.prepare(ref)))

    @contextmanager
    def _place(self, name: str) -> Iterator[None]:
        """One of the places for prepares. One may wait for an unprepare: that always gets in."""
        if not self._queue.acquire(blocking=False):
            raise NodeError(f"claim {name}: too many others wait; the kubelet will ask again")
        try:
            if not self._places.acquire(timeout=self._patience_seconds):
                raise TimedOut(
                    f"claim {name}: others were being prepared for "
                    f"{self._patience_seconds:g} s; the kubelet will ask again"
                )
            try:
                yield
            finally:
                self._places.release()
        finally:
            self._queue.release()


def _refs(message: Any) -> tuple[ClaimRef, ...]:
    """The claims of a request, each UID once (the answer has one entry per UID)."""
    refs = (ClaimRef(c.namespace, c.name, ClaimUid(c.uid)) for c in message.claims)
    return tuple({ref.uid: ref for ref in refs}.values())


def _fill(response: Any, answers: dict[ClaimUid, ClaimResponse], version: DraServiceVersion) -> Any:
    for uid, answer in answers.items():
        entry = response.claims[uid]  # looking a key up creates its entry
        entry.error = answer.error
        for device in answer.devices:
            added = entry.devices.add(
                request_names=device.requests,
                pool_name=device.pool,
                device_name=device.device,
                cdi_device_ids=device.cdi_ids,
            )
            if device.share is not None and version.share_ids:
                added.share_id = device.share
    return response


_LOGGED = {
    "ok": (logging.INFO, "claim served"),
    "refused": (logging.WARNING, "claim not served: %s"),
    "failed": (logging.WARNING, "claim not served: %s"),
    "crashed": (logging.ERROR, "claim crashed us: %s"),
}


def _log(
    operation: str, ref: ClaimRef, outcome: str, seconds: float, failure: Exception | None
) -> None:
    level, message = _LOGGED[outcome]
    if log.isEnabledFor(level):
        arguments = () if failure is None else (failure,)
        log.log(
            level,
            message,
            *arguments,
            exc_info=failure if outcome == "crashed" else None,
            extra={
                "operation": operation,
                "claim": str(ref),
                "uid": ref.uid,
                "seconds": round(seconds, 6),
                "outcome": outcome,
            },
        )
