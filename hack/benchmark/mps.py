"""What a claim under MPS takes: the first on a GPU, whose server has to start, and the next."""

import time
from pathlib import Path

from dra_driver.k8s.claims import ClaimRef
from dra_driver.sim.node_spec import node_file
from hack.benchmark.calls import Calls
from hack.benchmark.claims import NAMESPACE, Claims, namespace
from hack.benchmark.figures import Measured, Results, median_of, percentile
from hack.benchmark.sizes import Sizes
from hack.benchmark.stage import AS_IN_IMAGE, Stage
from hack.benchmark.usage import rss_mib
from tests.e2e.agent import Agent

_NODE = "h100x2-615"  # a driver with protocol 3: the server holds the limits
_SHARES = 20
_OTHER_NAMESPACE = f"{NAMESPACE}-whole"
_SETTLE_SECONDS = 2.0
_SPARE_SECONDS = 0.05


def measure(stage: Stage, sizes: Sizes, directory: Path) -> Results:
    """In each round a first claim on a GPU without a server, and then next ones beside it, in turns
    with claims for the other GPU as a whole: these are in another namespace, where no pod can have
    MPS too and none has to be read. In a CDI directory of its own, as ``prepares.measure_held``
    says why."""
    agent = Agent(node_file(_NODE), directory / "agent.log")
    agent.inside = AS_IN_IMAGE
    first: list[float] = []
    following: list[float] = []
    whole: list[float] = []
    try:
        agent.start(health_interval="5")
        cdi_dir = directory / "cdi"
        flags = {"sim": _NODE, "mps_socket": str(agent.socket), "cdi_dir": str(cdi_dir)}
        with namespace(stage.kube, _OTHER_NAMESPACE), stage.plugin(**flags) as calls:
            whole_gpus = Claims(stage.kube, stage.cluster.node_name, _OTHER_NAMESPACE)
            for _ in range(sizes.rounds):
                parts = stage.claims.on(["gpu-0"] * _SHARES, memory="2Gi", cores="4")
                others = whole_gpus.on(["gpu-1"] * (_SHARES - 1))
                first.append(calls.prepare(parts[0]))
                for part, whole_gpu in zip(parts[1:], others, strict=True):
                    whole.append(_prepare_alone(calls, whole_gpu))
                    calls.unprepare(whole_gpu)
                    following.append(_prepare_alone(calls, part))
                for part in parts:
                    calls.unprepare(part)
            time.sleep(_SETTLE_SECONDS)
            memory = rss_mib(agent.pid)
    finally:
        agent.close()
        stage.claims.delete()
    return {
        "mps_whole_prepare_p50_ms": median_of(whole),
        "mps_first_claim_ms": median_of(first, f"largest {max(first) * 1000:.3g}"),
        "mps_next_claim_p50_ms": median_of(
            following, f"p95 {percentile(following, 0.95) * 1000:.3g}"
        ),
        "mps_agent_rss_mib": Measured(
            memory["all"],
            ", ".join(f"{name} {mib:.1f}" for name, mib in memory.items() if name != "all"),
            1,
        ),
    }


def _prepare_alone(calls: Calls, ref: ClaimRef) -> float:
    """The seconds that it takes once the agent has made its spare namespace."""
    time.sleep(_SPARE_SECONDS)
    return calls.prepare(ref)
