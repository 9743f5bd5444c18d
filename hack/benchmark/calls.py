"""The kubelet's part: calls over the plugin's socket, timed."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from api.kubelet import dra_v1_pb2
from dra_driver.k8s.claims import ClaimRef
from hack.benchmark.errors import BenchError

_SECONDS = 45.0  # as the kubelet
_SERVICE = dra_v1_pb2.DESCRIPTOR.services_by_name["DRAPlugin"].full_name


class Calls:
    """One connection to the plugin at *socket*, as the kubelet has one."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._methods = {verb: self._method(verb) for verb in ("Prepare", "Unprepare")}

    def __enter__(self) -> "Calls":
        try:
            grpc.channel_ready_future(self._channel).result(timeout=10)
        except grpc.FutureTimeoutError as e:
            raise BenchError("waited 10 s for a connection to the plugin's socket") from e
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._channel.close()

    def prepare(self, *refs: ClaimRef) -> float:
        """One call for each claim, all at once; the seconds until every answer is there."""
        return self._ask("Prepare", refs)

    def unprepare(self, *refs: ClaimRef) -> float:
        return self._ask("Unprepare", refs)

    def empty(self, number: int = 1) -> float:
        """The seconds of calls, all at once, that ask for nothing: the way there and back."""
        return self._time("Prepare", [dra_v1_pb2.NodePrepareResourcesRequest()] * number)[0]

    def _ask(self, verb: str, refs: Sequence[ClaimRef]) -> float:
        kind = getattr(dra_v1_pb2, f"Node{verb}ResourcesRequest")
        requests = [
            kind(claims=[dra_v1_pb2.Claim(namespace=r.namespace, name=r.name, uid=r.uid)])
            for r in refs
        ]
        seconds, answers = self._time(verb, requests)
        for ref, answer in zip(refs, answers, strict=True):
            if error := answer.claims[ref.uid].error:
                raise BenchError(f"Node{verb}Resources of {ref} failed: {error}")
        return seconds

    def _time(self, verb: str, requests: Sequence[Any]) -> tuple[float, list[Any]]:
        method = self._methods[verb]
        begun = time.perf_counter()
        try:
            waiting = [method.future(request, timeout=_SECONDS) for request in requests]
            answers = [future.result() for future in waiting]
        except grpc.RpcError as e:
            raise BenchError(f"Node{verb}Resources failed: {e}") from e
        return time.perf_counter() - begun, answers

    def _method(self, verb: str) -> Any:
        response = getattr(dra_v1_pb2, f"Node{verb}ResourcesResponse")
        return self._channel.unary_unary(
            f"/{_SERVICE}/Node{verb}Resources",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=response.FromString,
        )
