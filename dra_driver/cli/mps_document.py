"""What ``dra-driver claims -o json`` says of MPS."""

from typing import Any

from dra_driver.cli.mps_usage import MpsUse, MpsUses
from dra_driver.model.mps import MpsServer


def use_document(use: MpsUse | None) -> dict[str, Any] | None:
    """Of one claim on one GPU; None: it is not under MPS there."""
    if use is None:
        return None
    served = use.served
    return {
        "percent": use.space.percent,
        "memoryLimitBytes": use.memory_bytes,
        "memoryUsedBytes": use.used_bytes,
        "clients": None if use.clients is None else list(use.clients),
        "protocol": served.protocol if served else None,
        "pipeDirectory": served.pipe_directory if served else None,
        "server": use.server,
    }


def server_document(server: MpsServer, uses: MpsUses) -> dict[str, Any]:
    return {
        "name": server.name,
        "gpus": list(server.gpus),
        "protocol": server.protocol,
        "ready": server.ready,
        "reason": server.reason,
        "restarts": server.restarts,
        "clients": sorted(client.pid for client in server.clients),
        "claims": list(uses.claims_of(server)),
    }


def agent_document(uses: MpsUses) -> dict[str, Any]:
    """Whether the agent told anything; ``answers`` is null where it was not asked."""
    told = uses.told
    asked = told.status is not None or bool(told.problem)
    return {"answers": told.status is not None if asked else None, "problem": told.problem}
