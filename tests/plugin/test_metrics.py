"""Which metrics name claims, and what is left of them where they may not."""

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from dra_driver.model.gpus import GpuUuid
from dra_driver.plan.memory.usage import ClaimMemoryUsage
from dra_driver.plan.mps.usage import ClaimMpsUsage
from dra_driver.plugin.metrics import Metrics, MpsMetrics
from tests.builders import ref

GPU, OTHER = GpuUuid("GPU-1"), GpuUuid("GPU-2")
OPERATE = Path(__file__).parents[2] / "docs/operate.md"


@pytest.fixture
def unnamed():
    return Metrics(claim_names=False)


def value(metrics, name, gpu):
    labels = {"namespace": "", "claim": "", "uuid": str(gpu)}
    return metrics.registry.get_sample_value(f"dra_driver_mps_{name}", labels)


def test_without_names_what_claims_do_under_mps_is_summed_for_each_gpu(unnamed):
    mps = MpsMetrics(unnamed)
    mps.mps_uses(
        [
            ClaimMpsUsage(ref("a"), GPU, 30, 2, 1),
            ClaimMpsUsage(ref("b"), GPU, 20, 3, 0),
            ClaimMpsUsage(ref("b"), OTHER, 50, 4, 0),
        ]
    )

    assert value(unnamed, "claim_cores_percent", GPU) == 50
    assert value(unnamed, "claim_clients", GPU) == 5
    assert value(unnamed, "bypassing_processes", GPU) == 1
    assert value(unnamed, "claim_clients", OTHER) == 4

    mps.mps_uses([ClaimMpsUsage(ref("b"), OTHER, 50, 4, 0)])

    assert value(unnamed, "claim_cores_percent", GPU) is None
    assert value(unnamed, "claim_cores_percent", OTHER) == 50


def test_a_sum_of_which_a_part_is_not_known_is_not_told(unnamed):
    mps = MpsMetrics(unnamed)
    mps.mps_uses(
        [ClaimMpsUsage(ref("a"), GPU, 30, None, 0), ClaimMpsUsage(ref("b"), GPU, 20, 3, 0)]
    )

    assert value(unnamed, "claim_clients", GPU) is None
    assert value(unnamed, "claim_cores_percent", GPU) == 50


def test_the_documents_list_the_metrics_that_name_claims():
    metrics = Metrics()
    mps = MpsMetrics(metrics)
    mps.mps_uses([ClaimMpsUsage(ref("a"), GPU, 30, 2, 1)])
    metrics.memory_used([ClaimMemoryUsage(GPU, ref("a"), 1, 2)], 0)
    told = generate_latest(metrics.registry).decode()
    naming = set(re.findall(r"^(dra_driver_\w+){.*claim=", told, re.MULTILINE))
    text = OPERATE.read_text().partition("These metrics tell")[2].partition("No metric names")[0]

    assert naming == set(re.findall(r"`(dra_driver_\w+)`", text))
    others = "".join(line for line in told.splitlines(True) if "claim=" not in line)
    assert "namespace" not in set(re.findall(r"[{,](\w+)=", others))
