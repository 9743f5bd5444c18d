"""Somebody else's plugin in the kubelet's registry: it answers GetInfo, and nothing more."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from api.kubelet import registration_v1_pb2 as messages
from dra_driver.kubeletplugin.serve.services import PLUGIN_TYPE, REGISTRATION_SERVICE


class Registrar:
    """Serves the registration socket *path* while it is entered."""

    def __init__(self, path: Path, name: str, endpoint: str) -> None:
        info = messages.PluginInfo(type=PLUGIN_TYPE, name=name, endpoint=endpoint)
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, context: info,
            request_deserializer=messages.InfoRequest.FromString,
            response_serializer=messages.PluginInfo.SerializeToString,
        )
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(REGISTRATION_SERVICE, {"GetInfo": handler}),)
        )
        self._server.add_insecure_port(f"unix:{path}")

    def __enter__(self) -> "Registrar":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
