"""How the kubelet gets to know us: the service behind the registration socket.

The kubelet watches its registry directory; behind a new socket it asks GetInfo, and tells us with
NotifyRegistrationStatus what came of it. It does so again after each of its own restarts.
"""

import logging
from typing import Any

import grpc
import grpc.aio

from api.kubelet import registration_v1_pb2 as messages

log = logging.getLogger(__name__)

PLUGIN_TYPE = "DRAPlugin"
SERVICE = str(messages.DESCRIPTOR.services_by_name["Registration"].full_name)


class Registration:
    """Tells the kubelet who we are and keeps what it said last."""

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
                SERVICE,
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
