"""A collection is listed once and then watched; of its objects only what is asked for is kept."""

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from dra_driver.base.errors import Gone
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.k8s.collection import Collection
from dra_driver.k8s.watch import BrokenEvent, WatchIntervals
from tests.waiting import eventually

FAST = WatchIntervals(watch=60, first_retry=0.01, last_retry=0.05)
PROFILES = "/apis/resource.nvidia.com/v1beta1/nodeprofiles"
NODES = "/api/v1/nodes"


@dataclass(frozen=True)
class Kept:
    uid: str
    color: str


def keep(document):
    metadata = document["metadata"]
    color = metadata["labels"]["color"]
    if color == "none":
        return None
    if color == "broken":
        raise ValueError("a color that nobody can read")
    return Kept(metadata["uid"], color)


@pytest.fixture
def node(server):
    def put(name, color="red", **labels):
        metadata = {"name": name, "labels": {"color": color, **labels}}
        return server.put({"kind": "Node", "metadata": metadata})

    return put


class Changes(list):
    """What was told, each as (name, color before, color after); one at a time."""

    def __init__(self):
        super().__init__()
        self.threads = set()
        self.under_way = 0

    def __call__(self, name, before, after):
        self.under_way += 1
        assert self.under_way == 1
        self.threads.add(threading.get_ident())
        self.append((name, before and before.color, after and after.color))
        self.under_way -= 1


@pytest.fixture
def follow(client):
    started = []

    def start(path=NODES, intervals=FAST, keep=keep, query=None):
        collection, changes = Collection(client, path, keep, query, intervals), Changes()
        started.append(collection)
        collection.start(changes)
        assert collection.wait_until_listed(60)
        return collection, changes

    yield start
    for collection in started:
        assert collection.stop(60)


def colors(collection):
    return {name: kept.color for name, kept in collection.now().items()}


def becomes(collection, **expected):
    return eventually(lambda: colors(collection) == expected, f"{expected}")


def is_watching(server, times=1):
    return server.wait(lambda: server.count("WATCH") >= times)


def test_what_is_there_is_listed_and_what_happens_is_watched(server, node, follow):
    for name in ("a", "b", "c"):
        node(name)
    collection, changes = follow()
    assert sorted(changes) == [("a", None, "red"), ("b", None, "red"), ("c", None, "red")]
    assert is_watching(server)
    changes.clear()

    node("b", "blue")
    node("d")
    server.remove("nodes", "a")

    assert becomes(collection, b="blue", c="red", d="red")
    assert changes == [("b", "red", "blue"), ("d", None, "red"), ("a", "red", None)]
    assert len(changes.threads) == 1
    assert (server.count("GET"), server.count("WATCH"), collection.lists) == (1, 1, 1)


def test_many_objects_come_in_pages(server, node, follow):
    for number in range(250):
        node(f"n{number}")

    collection, changes = follow()

    assert len(collection.now()) == 250
    assert eventually(lambda: len(changes) == 250)
    assert (server.count("GET"), collection.lists) == (3, 1)


def test_a_change_of_what_is_not_kept_is_not_told(server, node, follow):
    node("a")
    collection, changes = follow()
    before = collection.now()["a"]

    node("a", other="1")
    node("b", "none")
    node("c")

    assert becomes(collection, a="red", c="red")
    assert changes == [("a", None, "red"), ("c", None, "red")]
    assert collection.now()["a"] is before


def test_what_concerns_us_no_longer_is_gone(node, follow):
    node("a")
    collection, changes = follow()

    node("a", "none")

    assert becomes(collection)
    assert changes[-1] == ("a", "red", None)


def test_only_what_is_selected_is_followed(server, node, follow):
    node("a", ours="1")
    node("b")
    collection, _ = follow(query={"labelSelector": "ours=1"})
    assert colors(collection) == {"a": "red"}

    node("b", ours="1")
    node("a")

    assert becomes(collection, b="red")


def test_a_watch_that_ends_goes_on_from_where_it_was(server, node, follow):
    node("a")
    collection, _ = follow()
    for times in range(1, 4):
        assert is_watching(server, times)
        server.end_watches()
        node("a", f"c{times}")
        assert becomes(collection, a=f"c{times}")

    assert collection.lists == 1


def test_an_outage_changes_nothing_and_no_list_follows_it(server, node, follow, caplog):
    node("a")
    collection, changes = follow()
    assert is_watching(server)

    server.refuse_connections()
    node("a", "blue")
    assert eventually(lambda: collection.errors > 3)
    assert colors(collection) == {"a": "red"}
    server.accept_connections()

    assert becomes(collection, a="blue")
    assert (collection.lists, server.count("GET")) == (1, 1)
    assert changes == [("a", None, "red"), ("a", "red", "blue")]
    said = [each.getMessage() for each in caplog.records if "cannot follow" in each.getMessage()]
    assert len(said) <= 2  # the connection broke, and then no other could be made


def test_after_a_bookmark_a_quiet_collection_needs_no_list(server, node, follow):
    server.bookmark_seconds = 0.01
    node("a")
    collection, _ = follow()
    server.put({"kind": "Namespace", "metadata": {"name": "elsewhere"}})
    newest = server.objects("namespaces")[0]["metadata"]["resourceVersion"]
    time.sleep(0.1)

    server.end_watches()
    assert is_watching(server, 2)

    assert int(server.requests[-1].query["resourceVersion"]) >= int(newest)
    assert collection.lists == 1


def test_what_vanished_while_nobody_watched_is_told_after_the_next_list(server, node, follow):
    for name in ("a", "b", "c"):
        node(name)
    collection, changes = follow()
    assert is_watching(server)
    server.refuse_connections()
    changes.clear()

    server.remove("nodes", "a")
    node("b", "blue")
    node("d")
    server.forget_history()
    server.accept_connections()

    assert becomes(collection, b="blue", c="red", d="red")
    assert sorted(changes) == [("a", "red", None), ("b", "red", "blue"), ("d", None, "red")]
    assert collection.lists == 2


def test_a_list_that_is_forgotten_between_two_pages_begins_again(server, node, client):
    for number in range(150):
        node(f"n{number}")
    server.fail(410, "GET", times=2)  # the second time at a token that continues the list
    pages = []

    class OneForgotten:
        """The API server, which forgets its history while the first page is read."""

        watch = client.watch

        def pages(self, path, query):
            for page in client.pages(path, query):
                pages.append(page["metadata"].get("continue"))
                if len(pages) == 1:
                    server.forget_history()
                yield page

    api: Any = OneForgotten()
    collection = Collection(api, NODES, keep, intervals=FAST)
    collection.start(changes := Changes())
    assert collection.wait_until_listed(60)
    assert collection.stop(60)

    assert (len(changes), len(pages)) == (150, 3)
    assert collection.lists == 4


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_api_server_is_asked_again(server, node, follow, status):
    node("a")
    server.fail(status, times=12, retry_after=0)

    collection, _ = follow()

    assert becomes(collection, a="red")


def test_an_api_server_that_hangs_is_given_up_and_asked_again(server, node, tmp_path):
    node("a")
    access = load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))
    hasty = ApiClient(access, ApiTimeouts(read=0.1, watch=0.1, retry=0.005))
    server.delay(60, "GET", times=4)
    server.delay(60, "WATCH", times=2)

    collection = Collection(hasty, NODES, keep, intervals=FAST)
    collection.start(Changes())
    assert becomes(collection, a="red")
    node("a", "blue")
    assert becomes(collection, a="blue")
    assert collection.stop(60)
    hasty.close()

    assert (collection.lists, collection.errors) == (2, 3)


def test_an_object_that_cannot_be_read_spoils_no_other(server, node, follow, caplog):
    node("a")
    node("b", "broken")
    server.put({"kind": "Node", "metadata": {"name": "c"}})  # it has no labels at all
    collection, changes = follow()
    assert (colors(collection), collection.skipped) == ({"a": "red"}, 2)

    node("b", "broken", again="1")
    node("a", "broken")
    node("c")

    assert becomes(collection, c="red")
    assert collection.skipped == 2
    assert ("a", "red", None) in changes
    node("b")
    server.remove("nodes", "a")
    assert becomes(collection, b="red", c="red")
    assert eventually(lambda: collection.skipped == 0)
    said = [each.object for each in caplog.records if "cannot be read" in each.getMessage()]
    assert sorted(said) == ["a", "b", "c"]


def test_a_fault_in_what_is_told_ends_nothing(server, node, client):
    node("a")

    def fails(name, before, after):
        raise RuntimeError(name)

    collection = Collection(client, NODES, keep, intervals=FAST)
    collection.start(fails)
    assert is_watching(server)
    node("b")

    assert becomes(collection, a="red", b="red")
    assert collection.stop(60)
    assert collection.lists == 1


def test_a_resource_that_is_removed_is_empty_until_it_is_back(server, follow, caplog):
    profile = {"kind": "NodeProfile", "metadata": {"name": "p", "labels": {"color": "red"}}}
    server.put(profile)
    collection, changes = follow(PROFILES)
    assert (colors(collection), collection.is_served) == ({"p": "red"}, True)

    server.remove_crd("nodeprofiles")
    assert eventually(lambda: not collection.is_served)
    assert (colors(collection), changes[-1]) == ({}, ("p", "red", None))
    asked = server.count()
    time.sleep(0.3)
    assert server.count() <= asked + 1

    server.add_crd("nodeprofiles")
    server.put(profile)
    assert becomes(collection, p="red")
    assert collection.is_served
    said = [each for each in caplog.records if "is not there" in each.getMessage()]
    assert len(said) == 1


def test_a_resource_that_never_was_there_is_empty(server, follow):
    server.remove_crd("nodeprofiles")

    collection, changes = follow(PROFILES)

    assert (collection.now(), collection.is_served, changes) == ({}, False, [])


class Answers:
    """An API server that answers with these lists, and whose watches have these lines."""

    def __init__(self, lists, watches):
        self.lists, self.watches = list(lists), list(watches)
        self.since = []

    def pages(self, path, query):
        yield self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]

    def watch(self, path, query, seconds, metadata_only=False):
        self.since.append(query["resourceVersion"])
        return Lines(self.watches.pop(0) if self.watches else [])


class Lines:
    def __init__(self, events):
        self.events = events

    def __iter__(self):
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event

    def close(self):
        pass


def listed(version, *items):
    return {"kind": "NodeList", "metadata": {"resourceVersion": version}, "items": list(items)}


def red(name):
    return {"metadata": {"name": name, "uid": name, "labels": {"color": "red"}}}


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param({"kind": "Status"}, id="no list"),
        pytest.param({"metadata": {"resourceVersion": "1"}}, id="no items"),
        pytest.param({"metadata": {"resourceVersion": "1"}, "items": {"a": 1}}, id="no array"),
        pytest.param({"metadata": [], "items": []}, id="no metadata"),
        pytest.param({"metadata": {"resourceVersion": 7}, "items": []}, id="no version"),
        pytest.param({"metadata": {"resourceVersion": "x"}, "items": []}, id="no number"),
    ],
)
def test_what_is_no_list_takes_nothing_away(garbage):
    answers: Any = Answers([listed("1", red("a")), garbage], [[Gone("too old")]])
    collection = Collection(answers, NODES, keep, intervals=FAST)
    collection.start(changes := Changes())
    assert eventually(lambda: collection.lists > 3)
    assert collection.stop(60)

    assert (colors(collection), changes) == ({"a": "red"}, [("a", None, "red")])


def test_items_and_events_that_are_no_objects_are_passed_over():
    events = [{"type": "ADDED"}, {"type": "ADDED", "object": [1]}, {"object": {"metadata": 5}}]
    after = {"type": "ADDED", "object": red("b")}
    answers: Any = Answers(
        [listed("1", 7, None, {"metadata": {}}, red("a"), {"metadata": {"name": 5}})],
        [[*events, after]],
    )
    collection = Collection(answers, NODES, keep, intervals=FAST)
    collection.start(Changes())

    assert becomes(collection, a="red", b="red")
    assert collection.stop(60)
    assert collection.lists == 1


def test_an_event_that_is_broken_again_and_again_is_passed_by_a_list():
    broken = BrokenEvent("cut off")
    answers: Any = Answers([listed("1", red("a")), listed("9", red("b"))], [[broken], [broken]])
    collection = Collection(answers, NODES, keep, intervals=FAST)
    collection.start(Changes())

    assert becomes(collection, b="red")
    assert eventually(lambda: len(answers.since) > 2)
    assert collection.stop(60)
    assert answers.since[:3] == ["1", "1", "9"]
    assert collection.lists == 2


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_changes_told_lead_to_what_is_there(server, node, follow, seed):
    chance = random.Random(seed)
    names = [f"n{number}" for number in range(6)]
    collection, changes = follow()

    def trouble():
        chance.choice(
            [
                server.end_watches,
                server.forget_history,
                lambda: server.fail(
                    chance.choice([404, 410, 429, 500]), times=chance.randint(1, 3)
                ),
                lambda: server.hang_up(times=chance.randint(1, 3)),
                lambda: (server.refuse_connections(), server.accept_connections()),
            ]
        )()

    for _ in range(60):
        name = chance.choice(names)
        if chance.random() < 0.3:
            trouble()
        if chance.random() < 0.3 and any(
            each["metadata"]["name"] == name for each in server.objects("nodes")
        ):
            server.remove("nodes", name)
        else:
            node(name, chance.choice(["red", "blue", "none", "broken"]))
        time.sleep(chance.choice([0.0, 0.0, 0.01]))
    server.heal()

    there = {each["metadata"]["name"]: each["metadata"] for each in server.objects("nodes")}
    shown = {name: metadata["labels"]["color"] for name, metadata in there.items()}
    becomes(collection, **{name: c for name, c in shown.items() if c in ("red", "blue")})
    assert eventually(lambda: state_after(changes) == colors(collection))


def state_after(changes):
    """The objects that there are after *changes*, each of which has to follow from those before."""
    state: dict[str, str] = {}
    for name, before, after in tuple(changes):
        assert state.pop(name, None) == before
        if after is not None:
            state[name] = after
    return state


def test_stopping_takes_no_time_whatever_the_api_server_does(server, node, client):
    node("a")
    collection = Collection(client, NODES, keep, intervals=FAST)
    collection.start(Changes())
    assert is_watching(server)
    began = time.monotonic()

    assert collection.stop()

    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("times", [1, 20])
def test_what_knows_nothing_at_all_is_no_api_server(server, node, follow, times):
    node("a")
    collection, changes = follow()
    assert is_watching(server)
    server.fail(404, times=2 * times)  # as a load balancer does that has lost the API server
    server.end_watches()
    node("a", "blue")

    assert becomes(collection, a="blue")
    assert changes == [("a", None, "red"), ("a", "red", "blue")]
    assert collection.is_served
