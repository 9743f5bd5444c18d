"""What an API server keeps of slices is found by asking it, and nothing is left behind."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from dra_driver.base.errors import Forbidden, Refused
from dra_driver.kubeletplugin.slices.features import (
    SliceFeatures,
    probe_device_features,
    probe_slice_features,
)

DRIVER, NODE = "driver.example", "n1"
ALL = SliceFeatures(
    device_taints=True,
    consumable_capacity=True,
    shared_counters=True,
    counters_apart=True,
    counters_beside=False,
    list_attributes=True,
)


class Older:
    """An API server that takes part of what it is given, and may refuse what is left of it."""

    def __init__(self, refuses=lambda spec: False, features=lambda device: device):
        self.refuses = refuses
        self.features = features

    def create(self, path, document, query):
        assert query == {"dryRun": "All"}
        spec = document["spec"]
        if self.refuses(spec):
            raise Refused("422 Invalid")
        devices = [self.features(device) for device in spec.get("devices", ())]
        return {**document, "spec": {**spec, **({"devices": devices} if devices else {})}}


def older(**answers) -> Any:
    """It cannot do all that an API server can."""
    return Older(**answers)


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_an_api_server_with_every_gate_on_keeps_everything(client, version):
    assert probe_slice_features(client, version, DRIVER, NODE) == ALL


def test_nothing_is_stored(client, server):
    probe_slice_features(client, "v1", DRIVER, NODE)

    assert server.objects("resourceslices") == []
    assert {request.query.get("dryRun") for request in server.requests} == {"All"}


def test_the_slices_are_those_that_an_admission_policy_for_this_node_lets_pass(client, server):
    probe_slice_features(client, "v1", DRIVER, NODE)

    specs = [request.body["spec"] for request in server.requests]
    assert {(s["driver"], s["nodeName"], s["pool"]["name"]) for s in specs} == {
        (DRIVER, NODE, NODE)
    }


@pytest.mark.parametrize(
    ("gate", "lost"),
    [
        ("DRADeviceTaints", {"device_taints"}),
        ("DRAConsumableCapacity", {"consumable_capacity"}),
        ("DRAPartitionableDevices", {"shared_counters", "counters_apart"}),
    ],
)
def test_a_gate_that_is_off_costs_its_feature_and_no_other(client, server, gate, lost):
    server.disable(gate)

    features = asdict(probe_slice_features(client, "v1", DRIVER, NODE))

    assert {name for name, value in asdict(ALL).items() if features[name] != value} == lost


def test_list_attributes_that_are_refused_are_not_there():
    def has_list(spec):
        devices = spec.get("devices", ())
        return any("ints" in a for d in devices for a in d.get("attributes", {}).values())

    server = older(
        refuses=lambda spec: has_list(spec) or {"devices", "sharedCounters"} <= set(spec)
    )

    assert probe_slice_features(server, "v1", DRIVER, NODE) == replace(ALL, list_attributes=False)


def test_counters_that_have_to_lie_beside_their_devices_are_told_from_those_apart():
    def apart(spec):
        consumes = any("consumesCounters" in d for d in spec.get("devices", ()))
        return consumes and "sharedCounters" not in spec

    features = probe_slice_features(older(refuses=apart), "v1", DRIVER, NODE)

    assert (features.counters_apart, features.counters_beside) == (False, True)


def test_half_of_a_feature_is_not_the_feature():
    def without_policy(device):
        capacity = {
            name: {k: v for k, v in each.items() if k != "requestPolicy"}
            for name, each in device.get("capacity", {}).items()
        }
        return {**device, "capacity": capacity}

    assert not probe_slice_features(
        older(features=without_policy), "v1", DRIVER, NODE
    ).consumable_capacity


def test_who_may_not_create_slices_is_told_so(client, server):
    server.deny("create", "resourceslices")

    with pytest.raises(Forbidden, match="cannot create"):
        probe_slice_features(client, "v1", DRIVER, NODE)


def test_a_plain_slice_that_is_refused_tells_nothing_about_features():
    with pytest.raises(Refused):
        probe_slice_features(older(refuses=lambda spec: True), "v1", DRIVER, NODE)


def test_what_a_plugin_has_to_know_is_found_in_one_request(client, server):
    assert probe_device_features(client, "v1", DRIVER, NODE) == (True, True, True)
    assert len([request for request in server.requests if request.method == "POST"]) == 1


@pytest.mark.parametrize(
    ("gate", "features"),
    [
        ("DRAConsumableCapacity", (False, True, True)),
        ("DRADeviceTaints", (True, False, True)),
        ("DRAPartitionableDevices", (True, True, False)),
    ],
)
def test_a_gate_that_is_off_costs_devices_its_feature_only(client, server, gate, features):
    server.disable(gate)

    assert probe_device_features(client, "v1", DRIVER, NODE) == features


def test_counters_that_have_to_lie_beside_their_devices_are_none_for_us():
    def apart(spec):
        return any("consumesCounters" in device for device in spec["devices"])

    assert probe_device_features(older(refuses=apart), "v1", DRIVER, NODE) == (True, True, False)


def test_an_api_server_that_takes_no_devices_tells_nothing_about_them():
    with pytest.raises(Refused):
        probe_device_features(older(refuses=lambda spec: True), "v1", DRIVER, NODE)
