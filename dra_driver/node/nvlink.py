"""Which GPUs reach each other over NVLink."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Links:
    """Where the active NVLinks of one GPU lead."""

    switch: bool = False  # to an NVSwitch
    peers: frozenset[str] = frozenset()  # straight to GPUs: their bus ids


def neighbours(links: Mapping[str, Links]) -> Mapping[str, frozenset[str]]:
    """For each GPU, by bus id, the others of *links* that it reaches in one hop or through
    switches.

    NVSwitches of one node form one fabric, so all GPUs on a switch reach each other.
    """
    switched = {gpu for gpu, its in links.items() if its.switch}
    reached = {gpu: set(switched) if gpu in switched else set() for gpu in links}
    for gpu, its in links.items():
        for peer in its.peers & links.keys():
            reached[gpu].add(peer)
            reached[peer].add(gpu)
    return {gpu: frozenset(others - {gpu}) for gpu, others in reached.items()}


def clique(gpu: str, reached: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """The GPUs that all reach each other and that *gpu* is one of; None where there is no such set.

    A ring or a hybrid cube mesh (DGX-1) has neighbours without being a clique.
    """
    members = reached[gpu] | {gpu}
    if len(members) > 1 and all(reached[member] | {member} == members for member in members):
        return members
    return None
