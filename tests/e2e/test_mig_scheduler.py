"""The scheduler gives out an A100 in every way that the board can be cut, and in no other.

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

    its: MigInfo
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
        return tuple(one.name for one in by_size)

    def sets(self) -> set[Kinds]:
        """The kinds of every set of partitions that the board takes."""
        every = [device.partition for device in self.offer.devices if device.partition]
        found = set()

        def grow(chosen: list[Partition], first: int) -> None:
            found.add(self.ordered(one.profile.name for one in chosen))
            for number in range(first, len(every)):
                if legal(self.its, [*chosen, every[number]]):
                    grow([*chosen, every[number]], number + 1)

        grow([], 0)
        return found

    def largest(self, sets: set[Kinds]) -> list[Kinds]:
        """Those to which nothing can be added."""
        return [
            kinds
            for kinds in sets
            if not any(self.and_one(kinds, kind) in sets for kind in self.kinds)
        ]

    def and_one(self, kinds: Kinds, one: str) -> Kinds:
        return self.ordered([*kinds, one])

    def ordered(self, kinds) -> Kinds:
        return tuple(sorted(kinds, key=self.kinds.index))

    def partitions(self, devices) -> list[Partition]:
        found = (self.offer.by_name[device].partition for device in devices)
        return [partition for partition in found if partition is not None]


def board_of(profile) -> Board:
    """An A100 in MIG mode under this profile."""
    with (
        tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory,
        open_simulated("a100-40x1", Path(directory)) as node,
    ):
        inventory = after_switch(node.refresh(), profile, ApiFeatures(), {})
    its = inventory.gpus[0].mig
    assert its is not None
    return Board(its, build_offer(inventory, profile, ApiFeatures(), {}))


@pytest.fixture(autouse=True)
def counters(chart, cluster):
    """The classes are there, and the API server keeps counters in slices of their own."""
    if int(cluster.version.split(".")[1]) < 35:
        pytest.skip("this API server keeps no counters (KEP-4815)")


def ask(kube, node, name, kinds):
    """A pod on *node* that asks for all of *kinds* in one claim."""
    wanted = [
        part(kind, f"r{number}", count=count)
        for number, (kind, count) in enumerate(Counter(kinds).items())
    ]
    kube.apply(claim(name, *wanted))
    kube.apply(pod_for(node, name, name))


def told(kube, questions):
    """What the scheduler says of pods, each a name, its node and what it asks for: "" where it was
    scheduled, or why not."""
    at_once(lambda question: ask(kube, *question), questions)
    return answers(kube, [name for _, name, _ in questions])


def answers(kube, pods):
    """What the scheduler says of each of *pods*, once it does of all: "", or why not."""

    def said():
        there = {pod["metadata"]["name"]: pod for pod in kube.all("Pod")}
        found = {name: _answer(there[name]) for name in pods}
        return found if None not in found.values() else None

    return wait("an answer for every pod", said, 120, 0.5)


def _answer(pod):
    conditions = pod["status"].get("conditions", ())
    found = next(
        (condition for condition in conditions if condition["type"] == "PodScheduled"), None
    )
    if found is None:
        return None
    return "" if found["status"] == "True" else found.get("message") or found["reason"]


def given(kube, *claims):
    """The devices of claims."""
    found = [kube.get("ResourceClaim", name)["status"]["allocation"]["devices"] for name in claims]
    return [result["device"] for devices in found for result in devices["results"]]


def seen(kube, node):
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
        for kinds in {board.and_one(some, kind) for some in sets for kind in board.kinds} - sets
        if all(less in sets for less in without_one(kinds))
    ]
    assert (len(largest), len(smallest)) == (44, 81)
    nodes = {f"fake-{n:03}": kinds for n, kinds in enumerate([*largest, *smallest])}

    with fake_nodes(kube, [board.pool(node) for node in [*nodes, "fake-last"]]):
        seen(kube, "fake-last")
        said = told(kube, [(node, node, kinds) for node, kinds in nodes.items()])
        assert {kinds for node, kinds in nodes.items() if said[node]} == set(smallest)
        assert [text for text in said.values() if text and WAITS not in text] == []
        for node, kinds in nodes.items():
            if not said[node]:
                partitions = board.partitions(given(kube, node))
                assert board.ordered(partition.profile.name for partition in partitions) == kinds
                assert legal(board.its, partitions)


def test_claims_that_come_one_after_the_other_fill_the_board_in_every_way(kube):
    """Profiles as usual, larger ones first. Then it is full: whatever else comes is refused."""
    board = board_of(dynamic())
    largest = board.largest(board.sets())
    nodes = {f"fake-{n:03}": kinds for n, kinds in enumerate(largest)}

    with fake_nodes(kube, [board.pool(node) for node in [*nodes, "fake-last"]]):
        seen(kube, "fake-last")
        for turn in range(max(map(len, largest))):
            come = {node: kinds[turn] for node, kinds in nodes.items() if len(kinds) > turn}
            said = told(kube, [(node, f"{node}-{turn}", [kind]) for node, kind in come.items()])
            assert {name: why for name, why in said.items() if why} == {}
        for node, kinds in nodes.items():
            devices = given(kube, *(f"{node}-{turn}" for turn in range(len(kinds))))
            assert legal(board.its, board.partitions(devices))

        more = [
            (node, f"{node}-{kind}".replace(".", "-"), [kind])
            for node in nodes
            for kind in board.kinds
        ]
        assert [name for name, why in told(kube, more).items() if WAITS not in why] == []
