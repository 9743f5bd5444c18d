"""The kubelet's DRA service: gRPC calls in, one answer per claim out.

One implementation serves v1 (Kubernetes 1.34 and newer) and v1beta1 (1.32 and newer). Every claim
of a call is served in a thread of its own, in its own ``try``, because a bad claim must not fail
its neighbours and one that waits for its device must not hold up others. The calls themselves only
wait for those threads, so an empty call (the liveness check) is answered whatever else goes on.
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
from dra_driver.errors import ClaimError, DriverError
from dra_driver.kubeletplugin.claims import ClaimRef, ClaimUid, PreparedDevice
from dra_driver.kubeletplugin.named_locks import NamedLocks

log = logging.getLogger(__name__)

# The kubelet gives up after 45 s and may ask again while its first call still runs here.
PATIENCE_SECONDS = 40.0
AT_ONCE = 64  # claims prepared side by side; the others queue

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it becomes part of file names


class Driver(Protocol):
    """What a driver does with one claim; asked again after a failure, a restart, a lost answer."""

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        """Make the claim's devices usable and say which; asked again, the same answer."""

    def unprepare(self, ref: ClaimRef) -> None:
        """Undo it; a claim that was never prepared is no error."""


class Observer(Protocol):
    """Who counts what was served."""

    def observe(self, operation: str, outcome: str, seconds: float) -> None:
        """One claim served.

        *operation*: prepare, unprepare. *outcome*: ok, refused (the claim is at fault), failed
        (the node or the cluster is), crashed (we are).
        """


@dataclass(frozen=True, slots=True)
class ServiceVersion:
    """One version of the kubelet's service: its messages, and what they can say."""

    name: str  # as GetInfo lists it: the last part of the package and the service
    messages: ModuleType
    share_ids: bool

    @property
    def service(self) -> str:
        """Its name on the wire."""
        return str(self.messages.DESCRIPTOR.services_by_name["DRAPlugin"].full_name)


# Newest first: from Kubernetes 1.34 on the kubelet takes the first of the list that it knows.
VERSIONS = (
    ServiceVersion("v1.DRAPlugin", dra_v1_pb2, share_ids=True),
    ServiceVersion("v1beta1.DRAPlugin", dra_v1beta1_pb2, share_ids=False),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the kubelet is told about one claim; with an error text, that it was not served."""

    devices: tuple[PreparedDevice, ...] = ()
    error: str = ""


class Service:
    """Serves the kubelet's calls for *driver*."""

    def __init__(
        self,
        driver: Driver,
        observer: Observer,
        patience_seconds: float = PATIENCE_SECONDS,
        at_once: int = AT_ONCE,
    ) -> None:
        self._driver = driver
        self._observer = observer
        self._patience_seconds = patience_seconds
        self._claims = NamedLocks(
            "claim {name} is still being served for an earlier call, {seconds} s "
            "later; the kubelet will ask again"
        )
        self._places = asyncio.Semaphore(at_once)

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
            for version in VERSIONS
        )

    def _method(self, version: ServiceVersion, verb: str) -> "grpc.RpcMethodHandler[Any, Any]":
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

    async def _serve_all(self, operation: str, refs: Sequence[ClaimRef]) -> dict[ClaimUid, Answer]:
        answers = await asyncio.gather(*(self._in_thread(operation, ref) for ref in refs))
        return {ref.uid: answer for ref, answer in zip(refs, answers, strict=True)}

    async def _in_thread(self, operation: str, ref: ClaimRef) -> Answer:
        """Serve one claim in a thread, to its end even if the kubelet gives up meanwhile.

        A daemon thread: the process must not outlive the plugin's grace because of a claim.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

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
            answer.set_result(Answer(error=f"claim {ref} got no thread: {error}"))
        return await asyncio.shield(answer)

    def _serve(self, operation: str, ref: ClaimRef) -> Answer:
        facts = {"operation": operation, "claim": str(ref), "uid": ref.uid}
        begun = time.monotonic()
        try:
            answer, outcome = self._ask(operation, ref), "ok"
            log.info("claim served", extra=facts | {"seconds": _since(begun), "outcome": outcome})
        except DriverError as error:
            answer, outcome = Answer(error=error.public), _outcome(error)
            log.warning(
                "claim not served: %s",
                error,
                extra=facts | {"seconds": _since(begun), "outcome": outcome},
            )
        except Exception as error:  # one claim's trouble must stay with that claim
            answer, outcome = (
                Answer(error=f"internal error: {type(error).__name__}: {error}"),
                "crashed",
            )
            log.exception(
                "claim crashed us", extra=facts | {"seconds": _since(begun), "outcome": outcome}
            )
        self._observer.observe(operation, outcome, time.monotonic() - begun)
        return answer

    def _ask(self, operation: str, ref: ClaimRef) -> Answer:
        if not _UID.fullmatch(ref.uid):
            raise ClaimError(
                f"claim {ref} has the UID {ref.uid!r}, which no Kubernetes object can have"
            )
        with self._claims.hold([f"{ref} (UID {ref.uid})"], self._patience_seconds):
            if operation == "unprepare":
                self._driver.unprepare(ref)
                return Answer()
            return Answer(tuple(self._driver.prepare(ref)))


def _refs(message: Any) -> tuple[ClaimRef, ...]:
    """The claims of a request, each UID once (the answer has one entry per UID)."""
    refs = (ClaimRef(c.namespace, c.name, ClaimUid(c.uid)) for c in message.claims)
    return tuple({ref.uid: ref for ref in refs}.values())


def _fill(response: Any, answers: dict[ClaimUid, Answer], version: ServiceVersion) -> Any:
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


def _tell(loop: asyncio.AbstractEventLoop, hear: Callable[[Any], None], news: Any) -> None:
    try:
        loop.call_soon_threadsafe(hear, news)
    except RuntimeError:  # the loop was closed: we stopped without waiting for this claim
        log.warning("a claim ended after the plugin stopped")
