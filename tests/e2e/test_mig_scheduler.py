"""The scheduler gives out an A100 in every way that the board can be partitioned, and in no other.

What the board takes is found by trying every set of placements, by the geometry alone; the
scheduler has only slices. It is asked on nodes that nobody runs, each for one question.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from dra_driver.kubeletplugin.slices.reconcile import Pool, split_into_slices
from dra_driver.model.gpus import MigInfo, Partition
from dra_driver.model.offer import ApiFeatures, Offer
from dra_driver.plan.mig.dynamic import after_switch
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from tests.e2e.fake_nodes import at_once, fake_nodes, pod_for
from tests.e2e.kube import wait
from tests.e2e.manifests import claim
from tests.e2e.mig import part
from tests.fakes.simulated import open_simulated
from tests.plan.mig.boards import dynamic, legal

WAITS = "cannot allocate"

Kinds = tuple[str, ...]
"""The profiles of some partitions, larger ones first."""


@dataclass(frozen=True)
class Board:
    """A GPU, what is offered of it, and which partitions fit beside each other."""

    mig: MigInfo
    offer: Offer

    def pool(self, node: str) -> Pool:
        return split_into_slices(
            node, published_devices(self.offer), published_counters(self.offer)
        )

    @property
    def kinds(self) -> Kinds:
        """The profiles that are offered, in the order in which they are asked for."""
        profiles = {device.partition.profile for device in self.offer.devices if device.partition}
        by_size = sorted(
            profiles, key=lambda profile: (-profile.size, -profile.slices, profile.name)
        )
        return tuple(profile.name for profile in by_size)

    def sets(self) -> set[Kinds]:
        """The kinds of every set of partitions that the board takes."""
        every = [device.partition for device in self.offer.devices if device.partition]
        sets = set()

        def grow(chosen: list[Partition], first: int) -> None:
            sets.add(self.ordered(partition.profile.name for partition in chosen))
            for number in range(first, len(every)):
                if legal(self.mig, [*chosen, every[number]]):
                    grow([*chosen, every[number]], number + 1)

        grow([], 0)
        return sets

    def largest(self, sets: set[Kinds]) -> list[Kinds]:
        """Those to which nothing can be added."""
        return [
            kinds
            for kinds in sets
            if not any(self.with_one_more(kinds, kind) in sets for kind in self.kinds)
        ]

    def with_one_more(self, kinds: Kinds, kind: str) -> Kinds:
        return self.ordered([*kinds, kind])

    def ordered(self, kinds) -> Kinds:
        return tuple(sorted(kinds, key=self.kinds.index))

    def partitions(self, devices) -> list[Partition]:
        partitions = (self.offer.by_name[device].partition for device in devices)
        return [partition for partition in partitions if partition is not None]


def board_of(profile) -> Board:
    """An A100 in MIG mode under this profile."""
    with (
        tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory,
        open_simulated("a100-40x1", Path(directory)) as node,
    ):
        inventory = after_switch(node.refresh(), profile, ApiFeatures(), {})
    mig = inventory.gpus[0].mig
    assert mig is not None
    return Board(mig, build_offer(inventory, profile, ApiFeatures(), {}))


@pytest.fixture(autouse=True)
def counters(chart, cluster):
    """The classes are there, and the API server keeps counters in slices of their own."""
    if int(cluster.version.split(".")[1]) < 35:
        pytest.skip("this API server keeps no counters (KEP-4815)")


def ask(kube, node, name, kinds):
    """A pod on *node* that asks for all of *kinds* in one claim."""
    requests = [
        part(kind, f"r{number}", count=count)
        for number, (kind, count) in enumerate(Counter(kinds).items())
    ]
    kube.apply(claim(name, *requests))
    kube.apply(pod_for(node, name, name))


def scheduler_answers(kube, questions):
    """What the scheduler says of pods, each a name, its node and what it asks for: "" where it was
    scheduled, or why not."""
    at_once(lambda question: ask(kube, *question), questions)
    return answers(kube, [name for _, name, _ in questions])


def answers(kube, pods):
    """What the scheduler says of each of *pods*, once it does of all: "", or why not."""

    def all_answers():
        pods_by_name = {pod["metadata"]["name"]: pod for pod in kube.all("Pod")}
        answer_by_pod = {name: _answer(pods_by_name[name]) for name in pods}
        return answer_by_pod if None not in answer_by_pod.values() else None

    return wait("an answer for every pod", all_answers, 120, 0.5)


def _answer(pod):
    conditions = pod["status"].get("conditions", ())
    scheduled = next(
        (condition for condition in conditions if condition["type"] == "PodScheduled"), None
    )
    if scheduled is None:
        return None
    return "" if scheduled["status"] == "True" else scheduled.get("message") or scheduled["reason"]


def allocated_devices(kube, *claims):
    """The devices of claims."""
    allocations = [
        kube.get("ResourceClaim", name)["status"]["allocation"]["devices"] for name in claims
    ]
    return [result["device"] for devices in allocations for result in devices["results"]]


def wait_for_node(kube, node):
    """Until the scheduler knows *node*, which is the last one that was made."""
    ask(kube, node, "canary", ["7g.40gb"])
    wait("the scheduler to know all nodes", lambda: answers(kube, ["canary"]) == {"canary": ""})


def without_one(kinds):
    return [kinds[:n] + kinds[n + 1 :] for n in range(len(kinds))]


def test_every_set_that_the_board_takes_is_given_out_in_one_claim_and_no_other(kube):
    """All profiles, those with all media engines too. Of the sets that the board takes the largest
    are asked for, and of the others the smallest: every other set follows."""
    board = board_of(dynamic("*"))
    sets = board.sets()
    largest = board.largest(sets)
    smallest = [
        kinds
        for kinds in {board.with_one_more(some, kind) for some in sets for kind in board.kinds}
        - sets
        if all(less in sets for less in without_one(kinds))
    ]
    assert (len(largest), len(smallest)) == (44, 81)
    nodes = {f"fake-{n:03}": kinds for n, kinds in enumerate([*largest, *smallest])}

    with fake_nodes(kube, [board.pool(node) for node in [*nodes, "fake-last"]]):
        wait_for_node(kube, "fake-last")
        answer_by_pod = scheduler_answers(
            kube, [(node, node, kinds) for node, kinds in nodes.items()]
        )
        assert {kinds for node, kinds in nodes.items() if answer_by_pod[node]} == set(smallest)
        assert [text for text in answer_by_pod.values() if text and WAITS not in text] == []
        for node, kinds in nodes.items():
            if not answer_by_pod[node]:
                partitions = board.partitions(allocated_devices(kube, node))
                assert board.ordered(partition.profile.name for partition in partitions) == kinds
                assert legal(board.mig, partitions)


def test_claims_that_come_one_after_the_other_fill_the_board_in_every_way(kube):
    """Profiles as usual, larger ones first. Then it is full: whatever else comes is refused."""
    board = board_of(dynamic())
    largest = board.largest(board.sets())
    nodes = {f"fake-{n:03}": kinds for n, kinds in enumerate(largest)}

    with fake_nodes(kube, [board.pool(node) for node in [*nodes, "fake-last"]]):
        wait_for_node(kube, "fake-last")
        for turn in range(max(map(len, largest))):
            come = {node: kinds[turn] for node, kinds in nodes.items() if len(kinds) > turn}
            answer_by_pod = scheduler_answers(
                kube, [(node, f"{node}-{turn}", [kind]) for node, kind in come.items()]
            )
            assert {name: why for name, why in answer_by_pod.items() if why} == {}
        for node, kinds in nodes.items():
            devices = allocated_devices(kube, *(f"{node}-{turn}" for turn in range(len(kinds))))
            assert legal(board.mig, board.partitions(devices))

        more = [
            (node, f"{node}-{kind}".replace(".", "-"), [kind])
            for node in nodes
            for kind in board.kinds
        ]
        assert [
            name for name, why in scheduler_answers(kube, more).items() if WAITS not in why
        ] == []
