"""The gRPC services for the kubelet: registration, and DRA with one answer per claim.

The kubelet watches its registry directory; behind a new socket it asks GetInfo, and says with
NotifyRegistrationStatus what came of it. It does so again after each of its own restarts.

One implementation of the DRA service serves v1 (Kubernetes 1.34 and newer) and v1beta1 (1.32 and
newer). Every claim of a call is served in a thread of its own, in its own ``try``: a bad claim must
not fail its neighbours, and one that waits for its device must not hold up others. The calls only
wait for those threads, so an empty call (the liveness check) is always answered.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import grpc
import grpc.aio

from api.kubelet import dra_v1_pb2, dra_v1beta1_pb2
from api.kubelet import registration_v1_pb2 as messages
from dra_driver.base.errors import ClaimError, DriverError
from dra_driver.base.threads import NamedLocks
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

    @property
    def registered(self) -> bool:
        """Whether the kubelet accepted us the last time it said something."""
        return self._registered

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

    async def _get_info(self, _request: Any, _context: Any) -> messages.PluginInfo:
        return self._plugin

    async def _notified(
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    ) -> None:
        self._driver = driver
        self._observer = observer
        self._patience_seconds = patience_seconds
        self._claims = NamedLocks(
            "claim {name} is still being served for an earlier call, {seconds} s "
            "later; the kubelet will ask again"
        )
        self._places = asyncio.Semaphore(max_concurrent)

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

        async def call(message: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
            try:
                answers = await self._serve_all(verb.lower(), _refs(message))
                return _fill(response(), answers, version)
            except Exception:  # the process has to live on, and the kubelet asks again
                log.exception("call failed", extra={"method": f"Node{verb}Resources"})
                await context.abort(
                    grpc.StatusCode.INTERNAL, "internal error: see the plugin's log"
                )

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    async def _serve_all(
        self, operation: str, refs: Sequence[ClaimRef]
    ) -> dict[ClaimUid, ClaimResponse]:
        answers = await asyncio.gather(*(self._in_thread(operation, ref) for ref in refs))
        return {ref.uid: answer for ref, answer in zip(refs, answers, strict=True)}

    async def _in_thread(self, operation: str, ref: ClaimRef) -> ClaimResponse:
        """Serve one claim in a thread, to its end even if the kubelet gives up meanwhile.

        A daemon thread: the process must not outlive the plugin's grace because of a claim.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ClaimResponse] = loop.create_future()

        def serve() -> None:
            try:
                served = self._serve(operation, ref)
            except Exception as error:  # noqa: BLE001 - the waiting call logs it
                _tell(loop, answer.set_exception, error)
            else:
                _tell(loop, answer.set_result, served)

        if operation == "prepare":  # which may wait for an unprepare: that one always gets in
            await self._places.acquire()
            answer.add_done_callback(lambda _: self._places.release())
        try:
            threading.Thread(target=serve, name=f"{operation} {ref.uid}", daemon=True).start()
        except RuntimeError as error:  # the limit of processes is reached
            answer.set_result(ClaimResponse(error=f"claim {ref} got no thread: {error}"))
        return await asyncio.shield(answer)

    def _serve(self, operation: str, ref: ClaimRef) -> ClaimResponse:
        facts = {"operation": operation, "claim": str(ref), "uid": ref.uid}
        begun = time.monotonic()
        try:
            answer, outcome = self._ask(operation, ref), "ok"
            log.info("claim served", extra=facts | {"seconds": _since(begun), "outcome": outcome})
        except DriverError as error:
            answer, outcome = ClaimResponse(error=error.public), _outcome(error)
            log.warning(
                "claim not served: %s",
                error,
                extra=facts | {"seconds": _since(begun), "outcome": outcome},
            )
        except Exception as error:  # one claim's trouble must stay with that claim
            answer, outcome = (
                ClaimResponse(error=f"internal error: {type(error).__name__}: {error}"),
                "crashed",
            )
            log.exception(
                "claim crashed us", extra=facts | {"seconds": _since(begun), "outcome": outcome}
            )
        self._observer.observe(operation, outcome, time.monotonic() - begun)
        return answer

    def _ask(self, operation: str, ref: ClaimRef) -> ClaimResponse:
        if not _UID.fullmatch(ref.uid):
            raise ClaimError(
                f"claim {ref} has the UID {ref.uid!r}, which no Kubernetes object can have"
            )
        with self._claims.hold([f"{ref} (UID {ref.uid})"], self._patience_seconds):
            if operation == "unprepare":
                self._driver.unprepare(ref)
                return ClaimResponse()
            return ClaimResponse(tuple(self._driver.prepare(ref)))


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


def _outcome(error: DriverError) -> str:
    return "refused" if isinstance(error, ClaimError) else "failed"


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 6)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[Any], None], result: Any) -> None:
    try:
        loop.call_soon_threadsafe(callback, result)
    except RuntimeError:  # the loop was closed: we stopped without waiting for this claim
        log.warning("a claim ended after the plugin stopped")
