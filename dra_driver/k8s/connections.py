"""Connections to the API server, as a kubeconfig, the service account or the environment asks for.

A pod's CA and token need no more than urllib3; the official client sets up what else there is
(client certificates, proxies, programs that give credentials).
"""

import os
import pathlib
import socket

import urllib3

from dra_driver.base.errors import SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.access import ApiServerAccess

_CONNECTIONS = 16  # kept open between requests; more are opened where needed
_PROXY_VARIABLES = ("https_proxy", "http_proxy", "all_proxy")  # or in capitals

# A peer that vanished (a node without power, a firewall that forgot the connection) sends nothing:
# its idle connections are found out within 25 s, and what was sent is given up after 15 s.
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # as urllib3 has it, where it is told nothing
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000),  # milliseconds
)


@frozen
class Connections:
    """To one API server."""

    url: str
    pool: urllib3.PoolManager
    token: str = ""  # that a program of the kubeconfig gave


def open_connections(access: ApiServerAccess) -> Connections:
    """As *access* says; none is made before the first request. SettingsError: it cannot be."""
    cluster = access.cluster
    proxy = any(os.environ.get(n) or os.environ.get(n.upper()) for n in _PROXY_VARIABLES)
    if access.user or proxy or not cluster.keys() <= {"server", "certificate-authority"}:
        return _connections_of_official_client(access)
    # Read anew for each connection: it rotates. None: those that the system trusts.
    authority = cluster.get("certificate-authority")
    if authority is not None and not pathlib.Path(authority).is_file():
        raise SettingsError(f"the access to the API server cannot be set up: no file {authority}")
    pool = urllib3.PoolManager(
        cert_reqs="CERT_REQUIRED",
        ca_certs=authority,
        maxsize=_CONNECTIONS,
        socket_options=_SOCKET_OPTIONS,
    )
    return Connections(cluster["server"].rstrip("/"), pool)


def _connections_of_official_client(access: ApiServerAccess) -> Connections:
    # Here, since a pod needs none of it: 14 MiB of memory, and a fifth of a second at start.
    import kubernetes.client.rest
    import kubernetes.config

    configuration = kubernetes.client.Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    configuration.socket_options = _SOCKET_OPTIONS
    try:
        kubernetes.config.load_kube_config_from_dict(  # type: ignore[no-untyped-call]
            access.config, client_configuration=configuration, persist_config=False
        )
    except (kubernetes.config.ConfigException, ValueError, OSError) as e:
        raise SettingsError(f"the access to the API server cannot be set up: {e}") from e
    token = str(configuration.api_key.get("BearerToken", "")).removeprefix("Bearer ")
    program = access.user.get("exec")
    if program and not token and not configuration.cert_file:  # the library has logged why
        raise SettingsError(
            f"the kubeconfig's program {program.get('command')!r} gave neither a token nor a "
            "certificate; run it by itself to see why"
        )
    client = kubernetes.client.rest.RESTClientObject(configuration)
    return Connections(str(configuration.host), client.pool_manager, token)
