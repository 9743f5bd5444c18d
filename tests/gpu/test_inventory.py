"""What we would publish of this machine's GPUs, against what nvidia-smi says of them."""

import re
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.slices.reconcile import split_into_slices
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from dra_driver.plugin.publish.profiles import bundled_profile
from tests.fakes.pool_rules import validate_pool
from tests.gpu import smi

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def numa_node(bus_id):
    path = Path(f"/sys/bus/pci/devices/{bus_id}/numa_node")
    number = int(path.read_text()) if path.exists() else -1
    return number if number >= 0 else None


def test_every_gpu_is_offered_or_said_to_be_unavailable(node, document):
    inventory = node.refresh()

    offered = {gpu.uuid for gpu in inventory.gpus}
    described = " ".join(unavailable.what for unavailable in inventory.unavailable)
    for gpu in document.gpus:
        assert (gpu.uuid in offered) != (gpu.uuid in described), gpu
    modes = {gpu.uuid: gpu.mig for gpu in document.gpus}
    for ours in inventory.gpus:
        assert bool(ours.mig and ours.mig.on) == (modes[ours.uuid] == "Enabled"), ours


def test_every_field_is_what_nvidia_smi_says(node, document, ask_smi):
    query = ("--query-gpu=uuid,compute_cap", "--format=csv,noheader")
    capabilities = smi.parse_compute_caps(ask_smi(*query))

    for gpu in node.inventory().gpus:
        differ = smi.differences(gpu, document, capabilities[gpu.uuid], numa_node(gpu.pci_bus_id))
        assert differ == []


def test_devices_stand_in_the_order_of_their_minor_numbers(node):
    minors = [gpu.minor for gpu in node.inventory().gpus]

    assert minors == sorted(set(minors))


def test_brands_and_architectures_are_known(node):
    assert "Unknown" not in {
        word for gpu in node.inventory().gpus for word in (gpu.brand, gpu.architecture)
    }


def test_gpus_that_nvlink_joins_are_in_one_clique(node, ask_smi):
    try:
        matrix = ask_smi("topo", "-m")
    except NodeError as e:
        pytest.skip(f"nvidia-smi does not know the topology of this machine: {e}")
    joined = bool(re.search(r"\bNV\d+\b", matrix.partition("Legend")[0]))

    cliques = [gpu.topology.nvlink_clique for gpu in node.inventory().gpus]
    assert (len(cliques) - len(set(filter(None, cliques))) - cliques.count(None) > 0) == joined


def test_what_is_published_is_what_an_api_server_takes(node):
    with_partitions = bundled_profile("mig")
    assert with_partitions is not None
    for profile in (DEFAULT_PROFILE, with_partitions):
        offered = build_offer(node.inventory(), profile, ApiFeatures(), {})
        pool = split_into_slices("node-1", published_devices(offered), published_counters(offered))
        assert validate_pool(pool, "gpu.nvidia.com") == ()


def test_looking_again_sees_the_same(node):
    assert node.refresh() == node.refresh()
