"""Claims, DeviceClasses and slices as the API server has them."""

from dra_driver.cli.doctor.scheduling.published_devices import devices_of_slices
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from tests.builders import inventory

DRIVER = "gpu.nvidia.com"
A = f"device.attributes['{DRIVER}']"
OURS = f"device.driver == '{DRIVER}'"


def device_class(name, *expressions, resource=None, config=()):
    spec = {"selectors": _selectors(expressions), "config": list(config)}
    if resource:
        spec["extendedResourceName"] = resource
    return {"metadata": {"name": name}, "spec": spec}


def _selectors(expressions):
    return [{"cel": {"expression": text}} for text in expressions]


GPU_CLASS = device_class(DRIVER, f"{OURS} && {A}.type == 'gpu'")
MIG_CLASS = device_class(f"mig.{DRIVER}", f"{OURS} && {A}.type == 'mig'")


def request(device_class=DRIVER, *selectors, **fields):
    return {"deviceClassName": device_class, "selectors": _selectors(selectors), **fields}


def capacity(**amounts):
    return {"capacity": {"requests": amounts}}


def claim(*requests, config=(), constraints=(), **fields):
    """One for *requests*: r0, r1, …; a list is one for the first of them that is available."""
    listed = [
        {"name": f"r{i}", "firstAvailable" if isinstance(each, list) else "exactly": each}
        for i, each in enumerate(requests)
    ]
    devices = {"requests": listed, "config": list(config), "constraints": list(constraints)}
    return {
        "metadata": {"namespace": "team-a", "name": "a"},
        "spec": {"devices": devices},
        **fields,
    }


def slices(*gpus, rules=DEFAULT_PROFILE, features=None, node="n1", faults=()):
    """As the plugin publishes *gpus*, two where none is given: counters apart from devices.
    *faults*: what is wrong with them."""
    offered = build_offer(
        Inventory(gpus or inventory(2).gpus), rules, features or ApiFeatures(), {}, faults=faults
    )
    spec = {"driver": DRIVER, "nodeName": node}
    return [
        {"spec": {**spec, "devices": list(published_devices(offered))}},
        {"spec": {**spec, "sharedCounters": list(published_counters(offered))}},
    ]


def published(*node_slices, classes):
    """The devices of all the nodes."""
    return devices_of_slices(DRIVER, [each for part in node_slices for each in part], classes)
