"""The fleet: what its nodes publish, in our shape and as plain devices."""

from api import names
from dra_driver.kubeletplugin.slice_limits import check
from dra_driver.kubeletplugin.slices import split
from hack.benchmark.fleet import ours, plain
from hack.benchmark.fleet_nodes import GPUS, gpus_of


def exclusive(device):
    return not device.get("allowMultipleAllocations") and "taints" not in device


def test_a_plain_device_is_a_gpu_of_ours_that_one_claim_takes_as_a_whole():
    gpus = gpus_of("fleet-000")

    shared = {device["name"]: device for device in ours(gpus)}
    alone = {device["name"]: device for device in plain(gpus)}

    assert len(alone) == GPUS
    assert all(exclusive(device) for device in alone.values())
    assert not any(exclusive(shared[name]) for name in alone)
    for name, device in alone.items():
        assert device["attributes"] == shared[name]["attributes"]
        value = shared[name]["capacity"][names.MEMORY]["value"]
        assert device["capacity"] == {names.MEMORY: {"value": value}}


def test_the_api_server_takes_both():
    gpus = gpus_of("fleet-000")

    for shape in (ours, plain):
        assert check(split("fleet-000", shape(gpus)), names.DRIVER) == ()


def test_no_two_gpus_of_the_fleet_are_the_same():
    gpus = [*gpus_of("fleet-000"), *gpus_of("fleet-001")]

    assert len({gpu.uuid for gpu in gpus}) == 2 * GPUS
    assert len({gpu.pci_bus_id for gpu in gpus}) == GPUS
