"""What ``dra-driver claims -o json`` says of MPS."""

from collections.abc import Sequence
from typing import Any

from dra_driver.cli.mps_usage import MpsUses, SpaceUse
from dra_driver.model.mps import MpsServer


def device_document(uses: Sequence[SpaceUse]) -> dict[str, Any] | None:
    """Of one device; None: it is not under MPS, or in one of several spaces, nobody knows which."""
    return use_document(uses[0]) if len(uses) == 1 else None


def space_document(use: SpaceUse) -> dict[str, Any]:
    """Of one space of a claim on one GPU."""
    return {"space": use.space.name, "gpu": use.gpu, **use_document(use)}


def use_document(use: SpaceUse) -> dict[str, Any]:
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
        "namespace": server.tenant or None,
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
