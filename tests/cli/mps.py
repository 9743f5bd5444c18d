"""Short ways to write claims under MPS, and what an agent tells of them."""

from pathlib import Path

from dra_driver.cli.claims.run import ClaimsReport, report_text
from dra_driver.cli.mps_usage import ClaimsMpsUsage, MpsReport
from dra_driver.cli.terminal import Terminal
from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.model.gpus import Inventory
from dra_driver.model.mps import (
    MpsClient,
    MpsNamespace,
    MpsNamespaceName,
    MpsServer,
    ServedNamespace,
    mps_server_name,
)
from dra_driver.model.offer import Fractional
from dra_driver.model.steps import ServeMpsNamespace
from tests.builders import gpu, holding, record, ref

GIB = 1024**3
GPU, OTHER = gpu(0), gpu(1)
TOTAL = 81559 * 1024**2
SLICEABLE = Fractional(TOTAL, GIB, 1024**2, shares=48)
SERVER = mps_server_name([GPU.uuid])


def namespace(claim, gpus=(GPU,), percent=30, memory=10 * GIB, **fields):
    uuids = tuple(gpu.uuid for gpu in gpus)
    limits = tuple(memory for _ in gpus)
    return MpsNamespace(
        MpsNamespaceName(f"c_{claim}"), ref(claim).uid, uuids, percent, limits, **fields
    )


def claim(name, gpus=(GPU,), completed=True, cores=30, pods=(), **fields):
    """A claim with 10Gi of each of *gpus*, under MPS."""
    consumed = (("cores", str(cores)), ("memory", "10Gi"), ("shares", "1"))
    holdings = tuple(
        holding(name, gpu.name, consumed=consumed, gpu=gpu.uuid, shape=SLICEABLE) for gpu in gpus
    )
    steps = (ServeMpsNamespace(namespace(name, gpus, **fields)),)
    users = [Pod(pod, PodUid(pod)) for pod in pods]
    return record(name, *holdings, completed=completed, pods=users, steps=steps)


def served(record, protocol=3):
    (step,) = (step for step in record.steps if isinstance(step, ServeMpsNamespace))
    return ServedNamespace(step.namespace, protocol, f"/run/mps/{step.namespace.name}")


def server(*records, clients=(), protocol=3, ready=True, **fields):
    """The server of *records*; a client is a number, with the claim whose it is where that is
    told."""
    namespaces = tuple(served(record, protocol) for record in records)
    gpus = namespaces[0].namespace.gpus if namespaces else (GPU.uuid,)
    mps_clients = tuple(
        MpsClient(client)
        if isinstance(client, int)
        else MpsClient(client[0], MpsNamespaceName(f"c_{client[1]}"))
        for client in clients
    )
    return MpsServer(
        mps_server_name(gpus),
        gpus,
        protocol,
        ready,
        namespaces=namespaces,
        clients=mps_clients,
        **fields,
    )


def report(*records, answer=None, gpus=(GPU,)):
    """What ``claims`` reports of *records* on *gpus*; *answer*: what the MPS agent tells."""
    uses = ClaimsMpsUsage(records, answer or MpsReport())
    return ClaimsReport(records, {}, Inventory(gpus), uses)


def report_lines(*records, output="bars", width=150, **fields):
    """Of it, what people read."""
    text = report_text(report(*records, **fields), Path("/ledger"), output, Terminal(width=width))
    return text.splitlines()
