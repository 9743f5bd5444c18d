"""Files as people publish them for NVIDIA's device plugin, and what a node lists with each."""

from typing import Any

import pytest
import yaml

from api.names import DEVICE_PLUGIN_CONFIG_LABEL
from dra_driver.base.errors import ClaimError
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import DEVICE_PLUGIN_FEATURES, Offer
from dra_driver.model.profiles import Profile
from dra_driver.plan.device_plugin.allocations import allocation_claim
from dra_driver.plan.device_plugin.preferred import preferred
from dra_driver.plan.device_plugin.resources import listed_devices, resources, uuid_of
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.profiles.rules import decode_profile
from dra_driver.plan.profiles.selection import select_file
from tests.builders import MIB, POOL, gpu
from tests.plan.device_plugin.offers import GPU, NAMES, SHARED, given, made
from tests.plan.mig.boards import mig_gpu

TWO_GPUS = (gpu(0), gpu(1))


def profile(text: str, name: str = "published") -> Profile:
    return decode_profile(yaml.safe_load(text), name)


def offer_of(text: str, *gpus: Any) -> Offer:
    inventory = Inventory(gpus or TWO_GPUS)
    return build_offer(inventory, profile(text), DEVICE_PLUGIN_FEATURES, {})


def capacity(offer: Offer) -> dict[str, int]:
    """As ``kubectl describe node`` shows it."""
    offered = resources(offer, NAMES, ())
    assert offered.problems == ()
    return {resource.name: len(resource.devices) for resource in offered.resources}


def planned(offer: Offer, resource: str, number: int) -> Any:
    """What a container gets that asks for so many."""
    name = given(resource).resource
    ids = preferred(
        offer, name, list(listed_devices(offer.devices, NAMES)[name]), (), number, NAMES
    )
    claim = allocation_claim(given(resource, *ids), offer, NAMES, POOL)
    return plan_claim(claim, offer, (), POOL)


# NVIDIA's README, "CUDA Time-Slicing"; NVIDIA's GPU operator, "Time-Slicing GPUs in Kubernetes".
TIME_SLICING = """
version: v1
sharing:
  timeSlicing:
    renameByDefault: {rename}
    failRequestsGreaterThanOne: {fail}
    resources:
    - name: nvidia.com/gpu
      replicas: {replicas}
"""


@pytest.mark.parametrize(
    ("rename", "expected"), [("false", {GPU: 20}), ("true", {SHARED: 20})], ids=["gpu", "shared"]
)
def test_time_slicing_gives_ten_pods_a_gpu(rename, expected):
    offer = offer_of(TIME_SLICING.format(rename=rename, fail="false", replicas=10))

    assert capacity(offer) == expected
    plan = planned(offer, next(iter(expected)), 2)
    assert [holding.limit for holding in plan.holdings] == [None, None]  # as ever
    assert plan.steps == ()
    assert {holding.gpu for holding in plan.holdings} == {gpu(0).uuid, gpu(1).uuid}


def test_requests_greater_than_one_fail_where_the_file_says_so():
    offer = offer_of(TIME_SLICING.format(rename="false", fail="true", replicas=10))

    assert planned(offer, GPU, 1).holdings
    with pytest.raises(ClaimError, match=r'write "nvidia\.com/gpu": 1 in the resources\.limits'):
        planned(offer, GPU, 2)


# NVIDIA's README, "CUDA MPS".
MPS = """
version: v1
sharing:
  mps:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
"""


def test_mps_gives_ten_pods_a_tenth_of_the_memory_and_of_the_cores():
    offer = offer_of(MPS)

    assert capacity(offer) == {GPU: 20}
    (namespace,) = planned(offer, GPU, 1).record.namespaces
    assert (namespace.percent, namespace.memory_bytes) == (10, (8155 * MIB,))
    with pytest.raises(ClaimError, match="failRequestsGreaterThanOne"):
        planned(offer, GPU, 2)


def test_mps_that_allows_several_gives_so_many_tenths_of_each_gpu():
    text = MPS.replace("  mps:\n", "  mps:\n    failRequestsGreaterThanOne: false\n")

    (namespace,) = planned(offer_of(text), GPU, 2).record.namespaces

    assert namespace.gpus == (gpu(0).uuid, gpu(1).uuid)
    assert (namespace.percent, namespace.memory_bytes) == (10, (8155 * MIB, 8155 * MIB))


# CERN, "Efficient Access to Shared GPU Resources": files of a ConfigMap, by a label of the node.
BY_LABEL = {
    "no-shared-access": "version: v1\n",
    "slice-4": TIME_SLICING.format(rename="true", fail="true", replicas=4),
    "slice-10": TIME_SLICING.format(rename="true", fail="true", replicas=10),
}


@pytest.mark.parametrize(
    ("label", "expected"),
    [("no-shared-access", {GPU: 2}), ("slice-4", {SHARED: 8}), ("slice-10", {SHARED: 20})],
)
def test_a_label_of_the_node_says_how_many_pods_share_a_gpu(label, expected):
    selected = select_file("", "node-1", {DEVICE_PLUGIN_CONFIG_LABEL: label})

    assert capacity(offer_of(BY_LABEL[selected.name])) == expected


CERN_LAYOUT = (("2g.10gb", 0), ("2g.10gb", 2), ("1g.5gb", 4), ("1g.5gb", 5), ("1g.5gb", 6))
FOUR_A100 = tuple(made(*CERN_LAYOUT, minor=minor) for minor in range(4))


def test_the_strategy_mixed_lists_each_kind_of_instances():
    text = "version: v1\nflags:\n  migStrategy: mixed\n"

    assert capacity(offer_of(text, *FOUR_A100)) == {
        "nvidia.com/mig-1g.5gb": 12,
        "nvidia.com/mig-2g.10gb": 8,
    }


MIXED = """
version: v1
flags:
  migStrategy: mixed
sharing:
  timeSlicing:
    renameByDefault: {rename}
    resources:
    - name: nvidia.com/gpu
      replicas: 4
    - name: nvidia.com/mig-1g.5gb
      replicas: 2
    - name: nvidia.com/mig-2g.10gb
      replicas: 3
"""


@pytest.mark.parametrize(
    ("rename", "suffix"), [("false", ""), ("true", ".shared")], ids=["plain", "renamed"]
)
def test_time_slicing_on_top_of_mig_divides_instances_and_gpus_each_by_their_name(rename, suffix):
    offer = offer_of(MIXED.format(rename=rename), *FOUR_A100, mig_gpu("a100-40", 4))

    assert capacity(offer) == {
        f"nvidia.com/gpu{suffix}": 4,
        f"nvidia.com/mig-1g.5gb{suffix}": 24,
        f"nvidia.com/mig-2g.10gb{suffix}": 24,
    }
    assert offer.warnings == ()
    (holding,) = planned(offer, f"nvidia.com/mig-2g.10gb{suffix}", 1).holdings
    assert holding.uuid == "MIG-14-0-of-0"


def test_the_strategy_single_makes_gpus_of_instances_of_one_kind():
    text = "version: v1\nflags:\n  migStrategy: single\n"
    sevenths = made(*(("1g.5gb", start) for start in range(7)))

    assert capacity(offer_of(text, sevenths)) == {GPU: 7}


def test_under_single_the_replicas_of_gpus_are_those_of_instances():
    text = MIXED.format(rename="true").replace("mixed", "single")
    sevenths = made(*(("1g.5gb", start) for start in range(7)))

    # The file names the instances, too; what it says of these goes before.
    assert capacity(offer_of(text, sevenths)) == {SHARED: 14}
    short = "\n".join(text.splitlines()[:-4])
    assert capacity(offer_of(short, sevenths)) == {SHARED: 28}


def test_instances_with_media_engines_have_a_name_and_replicas_of_their_own():
    text = """
    flags: {migStrategy: mixed}
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb.me, replicas: 2}]}}
    """
    board = made(("1g.5gb+me", 0), ("1g.5gb", 1))

    assert capacity(offer_of(text, board)) == {
        "nvidia.com/mig-1g.5gb": 1,
        "nvidia.com/mig-1g.5gb.me": 2,
    }


@pytest.mark.parametrize(
    ("policy", "gpus"), [("packed", {0}), ("distributed", {0, 1})], ids=["packed", "distributed"]
)
def test_the_policy_says_of_which_gpus_replicas_are(policy, gpus):
    text = f"flags:\n  plugin:\n    sharedDevicesAllocationPolicy: {policy}\n"
    text += TIME_SLICING.format(rename="false", fail="false", replicas=4)

    holdings = planned(offer_of(text), GPU, 2).holdings

    assert {holding.gpu for holding in holdings} == {gpu(minor).uuid for minor in gpus}


# The flags that the README has, as a file; and the names that its ``resources`` would give.
FLAGS = """
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  nvidiaDriverRoot: "/"
  plugin:
    passDeviceSpecs: false
    deviceListStrategy: envvar
    deviceIDStrategy: index
resources:
  gpus:
  - pattern: "A100-SXM4-40GB"
    name: a100
  mig:
  - pattern: "1g.5gb"
    name: mig-small
sharing:
  timeSlicing:
    resources:
    - name: gpu
      rename: gpu-half
      devices: ["0"]
      replicas: 2
"""


def test_what_a_file_says_of_the_plugin_itself_is_told_and_changes_nothing():
    offer = offer_of(FLAGS)

    assert capacity(offer) == {GPU: 4}
    warnings = dict(warning.split(": has no meaning here: ") for warning in offer.warnings)
    of_the_node = ["flags.failOnInitError", "flags.migStrategy", "flags.nvidiaDriverRoot"]
    assert sorted(warnings)[:3] == of_the_node
    names = (
        "as with NVIDIA's plugin; the names that pods ask for are values of the chart "
        "(extendedResourceName)"
    )
    assert {path: warnings[path] for path in sorted(warnings)[3:]} == {
        "flags.plugin.passDeviceSpecs": "containers always get their device files",
        "flags.plugin.deviceListStrategy": "containers get their devices by CDI; by the "
        "device-plugin API before Kubernetes 1.29 file by file",
        "flags.plugin.deviceIDStrategy": "containers and the kubelet know devices by UUID",
        "resources.gpus": names,
        "resources.mig": names,
        "sharing.timeSlicing.resources[0].rename": names,
        "sharing.timeSlicing.resources[0].devices": "all GPUs of the node are shared alike, as by "
        "NVIDIA's plugin; a NodeProfile can tell them apart",
    }


def test_ids_are_uuids_whatever_the_strategy_for_ids_is():
    (resource,) = resources(offer_of(FLAGS), NAMES, ()).resources

    assert {uuid_of(device.id) for device in resource.devices} == {each.uuid for each in TWO_GPUS}
