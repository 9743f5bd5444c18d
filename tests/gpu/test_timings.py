"""What looking and preparing cost with a real NVML; the numbers are printed."""

import statistics
import time

import pytest

from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.machine import open_node

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROUNDS = 50


def milliseconds(call):
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def spread(times):
    ordered = sorted(times)
    p95 = ordered[int(len(ordered) * 0.95)]
    return f"p50 {statistics.median(ordered):.2f} ms, p95 {p95:.2f} ms ({len(ordered)} times)"


def test_looking_again_costs_less_than_a_tenth_of_a_second(driver, tmp_path, report):
    with open_node(NodeConfig(), tmp_path) as node:
        first = milliseconds(node.refresh)  # starts NVML
        again = [milliseconds(node.refresh) for _ in range(ROUNDS)]

    report([f"first look, with the start of NVML: {first:.0f} ms", f"look: {spread(again)}"])
    assert statistics.median(again) < 100


def test_preparing_a_gpu_takes_milliseconds(world, report):
    gpu = world.node.inventory().gpus[0]
    prepare, unprepare = [], []
    for number in range(ROUNDS):
        ref = world.claims.put(f"round-{number}", gpu.name)
        prepare.append(milliseconds(lambda ref=ref: world.preparer.prepare(ref)))
        unprepare.append(milliseconds(lambda ref=ref: world.preparer.unprepare(ref)))

    report([f"prepare: {spread(prepare)}", f"unprepare: {spread(unprepare)}"])
    assert statistics.median(prepare) < 50
