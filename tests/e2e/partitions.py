"""What end-to-end tests of MIG ask for and look at: partitions, by claims and by the board."""

import re

from dra_driver.sim.node_spec import read_node
from tests.e2e.kube import wait
from tests.e2e.manifests import CLASS, pod, request

LIST = "nvidia-smi -L; ls /dev/nvidia-caps 2>/dev/null | sort"
SHOW = f"{LIST}; env | grep -E '^(GPU_DEVICE|CUDA_MPS)_' | sort; " + (
    "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"  # as manifests.SLEEP
)
DEVICE = re.compile(r"gpu-(\d+)-mig-\w+-(\d+)-(\d+)")


def partition(profile, name="gpu", parent="", **fields):
    """A request for a partition, of the GPU *parent* if that is named."""
    word = profile.replace(".", "-").replace("+", "-")
    cel = f"device.attributes['{CLASS}'].parentUUID == '{parent}'" if parent else ""
    return request(name, cel, **{"deviceClassName": f"mig-{word}.{CLASS}", **fields})


def part(profile, memory, cores=None, **fields):
    """A request for a part of a partition."""
    amounts = {"memory": memory} | ({"cores": cores} if cores else {})
    return partition(profile, capacity={"requests": amounts}, **fields)


def held_partitions(driver):
    """What claims hold by the ledger: GPU, profile id and start of each partition."""
    names = {device["name"] for claim in driver.claims() for device in claim["devices"]}
    matches = [DEVICE.fullmatch(name) for name in names]
    return sorted(tuple(map(int, match.groups())) for match in matches if match)


def existing_partitions(driver):
    """What partitions the simulated driver keeps, in the same form; each has a compute instance."""
    minors = {gpu.uuid: gpu.minor for gpu in read_node(driver.node_file).gpus}
    partitions = [
        (minors[gpu], *instance)
        for gpu, instances in driver.instances().items()
        for instance in instances
    ]
    assert all(computes == 1 for *_, computes in partitions), partitions
    return sorted(each[:3] for each in partitions)


def settled(driver):
    """Until the partitions are those that claims hold: some are still being given back."""

    def whole():
        every = [instance for instances in driver.instances().values() for instance in instances]
        complete = all(computes == 1 for *_, computes in every)
        return complete and existing_partitions(driver) == held_partitions(driver)

    partitions = f"{driver.instances()}, held: {held_partitions(driver)}"
    wait(f"the partitions to be those that claims hold: {partitions}", whole, 60, 0.5)


def refused(kube, name, text="cannot allocate"):
    """Until it is said of a pod that it cannot be had."""
    wait(f"{text!r} to be said of {name}", lambda: text in str(kube.events(name)), 40)


def runs(kube, *names, command=SHOW, **source):
    """Start pods of these names, and wait until all of them run."""
    for name in names:
        kube.apply(pod(name, command, **source))
    for name in names:
        kube.wait_pod(name, "Running")


def printed(kube, name, words):
    return wait(f"{words} from {name}", lambda: words in (t := kube.logs(name)) and t, 20)


def gone(kube, *names):
    for name in names:
        kube.delete("Pod", name)
    for name in names:
        kube.wait_gone("Pod", name)
