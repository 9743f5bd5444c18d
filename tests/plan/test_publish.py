"""What the scheduler sees of a GPU, in the words of NVIDIA's driver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.devices import Topology
from dra_driver.model.inventory import Inventory
from dra_driver.plan.publish import published
from tests.fakes.values import gpu


def test_a_whole_gpu_is_published_with_all_its_names():
    topology = Topology("pci0000:15", "0000:16:00.0", 0, "nvswitch", 7)

    (device,) = published(Inventory((gpu(0, topology=topology, addressing_mode="HMM"),)))

    assert device == {
        "name": "gpu-0",
        "attributes": {
            "addressingMode": {"string": "HMM"},
            "architecture": {"string": "Hopper"},
            "brand": {"string": "Nvidia"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "cudaDriverVersion": {"version": "13.0.0"},
            "driverVersion": {"version": "580.95.5"},
            "nvlinkClique": {"string": "nvswitch"},
            "nvlinkPeers": {"int": 7},
            "pcieSwitch": {"string": "0000:16:00.0"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "resource.kubernetes.io/numaNode": {"int": 0},
            "resource.kubernetes.io/pciBusID": {"string": "0000:18:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:15"},
            "type": {"string": "gpu"},
            "uuid": {"string": "GPU-00000000-0000-0000-0000-000000000000"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }


def test_what_is_unknown_is_left_out():
    (device,) = published(Inventory((gpu(0, topology=Topology(), memory_bytes=None),)))

    assert device["capacity"] == {}
    assert "resource.kubernetes.io/numaNode" not in device["attributes"]
    assert "addressingMode" not in device["attributes"]


def test_memory_is_a_canonical_quantity():
    sizes = {80 * 1024**3: "80Gi", 81559 * 1024**2: "81559Mi", 1024**4: "1Ti", 1000: "1000"}
    for size, quantity in sizes.items():
        (device,) = published(Inventory((gpu(0, memory_bytes=size),)))

        assert device["capacity"]["memory"]["value"] == quantity


@pytest.mark.point(75)
@given(st.text(min_size=1, max_size=100))
def test_a_long_name_is_cut_to_64_bytes_without_breaking_a_character(name):
    (device,) = published(Inventory((gpu(0, product_name=name),)))

    shown = device["attributes"]["productName"]["string"]
    assert len(shown.encode()) <= 64
    assert name.startswith(shown)
