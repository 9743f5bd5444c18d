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


def held(driver):
    """What claims hold by the ledger: GPU, profile id and start of each partition."""
    names = {device["name"] for claim in driver.claims() for device in claim["devices"]}
    found = [DEVICE.fullmatch(name) for name in names]
    return sorted(tuple(map(int, match.groups())) for match in found if match)


def cut(driver):
    """What is cut by the simulated driver, in the same form; each with a compute instance."""
    minors = {gpu.uuid: gpu.minor for gpu in read_node(driver.node_file).gpus}
    cuts = [(minors[gpu], *one) for gpu, there in driver.cuts().items() for one in there]
    assert all(computes == 1 for *_, computes in cuts), cuts
    return sorted(each[:3] for each in cuts)


def settled(driver):
    """Until what is cut is what claims hold: some of them are still being given back."""

    def whole():
        cuts = [one for there in driver.cuts().values() for one in there]
        return all(computes == 1 for *_, computes in cuts) and cut(driver) == held(driver)

    wait(f"what is cut to be what is held: {driver.cuts()}, {held(driver)}", whole, 60, 0.5)


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
