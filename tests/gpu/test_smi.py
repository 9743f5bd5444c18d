"""nvidia-smi's document is read right, and every field that differs from ours is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.model.gpus import GpuUuid, Topology, Version
from tests.builders import gpu
from tests.gpu import smi

TEXT = Path(__file__).with_name("data").joinpath("h200.xml").read_text()
DOCUMENT = smi.parse(TEXT)
OURS = gpu(
    0,
    uuid=GpuUuid("GPU-5f2b8c1e-9d47-4a30-b6f8-2c71e05d9a44"),
    pci_bus_id="0000:1b:00.0",
    product_name="NVIDIA H200",
    memory_bytes=150754820096,
    addressing_mode="HMM",
    topology=Topology(numa_node=1),
)


def test_an_h200_is_read():
    (gpu,) = DOCUMENT.gpus

    assert (DOCUMENT.driver_version, DOCUMENT.cuda_version) == ("580.95.05", "13.0")
    assert (gpu.product, gpu.bus_id, gpu.memory) == (
        "NVIDIA H200",
        "00000000:1B:00.0",
        "143771 MiB",
    )
    assert gpu.settings["compute_mode"] == "Default"
    assert gpu.settings["gpu_power_readings/requested_power_limit"] == "700.00 W"
    assert all(gpu.settings.values()), "a newer nvidia-smi calls a setting something else"


def test_the_same_gpu_differs_in_nothing():
    assert smi.differences(OURS, DOCUMENT, "9.0", 1) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"minor": 1}, "minor number"),
        ({"pci_bus_id": "0000:1c:00.0"}, "bus id"),
        ({"product_name": "NVIDIA H100"}, "product"),
        ({"brand": "Tesla"}, "brand"),
        ({"architecture": "Ampere"}, "architecture"),
        ({"addressing_mode": None}, "addressing mode"),
        ({"memory_bytes": 150754820096 - 2**20}, "memory"),
        ({"memory_bytes": None}, "memory"),
        ({"driver_version": Version(580, 95, 6)}, "driver version"),
        ({"cuda_driver_version": Version(12, 9)}, "CUDA version"),
        ({"compute_capability": Version(8, 0)}, "compute capability"),
        ({"topology": Topology()}, "NUMA node"),
        ({"uuid": GpuUuid("GPU-0")}, "uuid"),
    ],
    ids=str,
)
def test_each_field_that_differs_is_named(fields, named):
    (difference,) = smi.differences(replace(OURS, **fields), DOCUMENT, "9.0", 1)

    assert difference.startswith(f"{named}: ")


def test_compute_capabilities_come_by_uuid():
    text = "GPU-a, 9.0\nGPU-b, 12.0\n"

    assert smi.parse_compute_caps(text) == {"GPU-a": "9.0", "GPU-b": "12.0"}


@pytest.mark.parametrize(
    ("version", "expected"), [("580.95.05", "580.95.5"), ("565.77", "565.77.0")]
)
def test_versions_become_semver(version, expected):
    assert smi.semver(version) == expected
