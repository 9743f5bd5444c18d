"""From the slices that are there to those we want: which writes, and what is seen on the way."""

import random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dra_driver.kubeletplugin.slices.reconcile import (
    Pool,
    SliceContent,
    SliceOwner,
    SliceWrites,
    is_advanced,
    plan_writes,
    split_into_slices,
)
from tests.fakes.pool_rules import validate_pool
from tests.kubeletplugin.slices.cluster import HOME, Cluster


def device(name, **more):
    return {"name": name, **more}


def pool(*slices, name="n1"):
    """A pool of slices, each a string with one letter per device."""
    return Pool(name, tuple(SliceContent(tuple(map(device, letters))) for letters in slices))


def test_a_slice_names_its_index_its_driver_its_node_and_its_owner():
    writes = plan_writes(pool("a"), [], HOME)

    assert writes == SliceWrites(
        create=(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {
                    "generateName": "00000-gpu.example.com-n1-",
                    "ownerReferences": [
                        {
                            "apiVersion": "v1",
                            "kind": "Node",
                            "name": "n1",
                            "uid": "uid-of-n1",
                            "controller": True,
                        }
                    ],
                },
                "spec": {
                    "driver": "gpu.example.com",
                    "nodeName": "n1",
                    "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "a"}],
                },
            },
        )
    )


@pytest.mark.point(78)
@pytest.mark.parametrize("empty", [split_into_slices("n1", ()), Pool("n1", ()), Pool("n1")])
def test_a_node_without_devices_has_one_empty_slice(empty):
    cluster = Cluster()

    assert cluster.publish(empty) == 1
    assert cluster.published() == [""]
    assert cluster.publish(empty) == 0


@pytest.mark.point(66)
def test_a_change_in_one_slice_is_one_update_in_the_same_generation():
    cluster = Cluster()
    cluster.publish(pool("ab", "cd"))

    assert cluster.publish(pool("ab", "ce")) == 1
    assert cluster.published() == ["ab", "ce"]
    assert cluster.generations() == {1}


@pytest.mark.point(66)
def test_a_change_in_two_slices_is_a_new_generation_of_all():
    cluster = Cluster()
    cluster.publish(pool("ab", "cd", "ef"))

    assert cluster.publish(pool("ac", "bd", "ef")) == 3
    assert cluster.generations() == {2}


@pytest.mark.point(65)
def test_every_slice_says_how_many_there_are():
    cluster = Cluster()
    for target in (pool("ab", "cd"), pool("ab", "cd", "e"), pool("ab")):
        cluster.publish(target)

        counts = [each["spec"]["pool"]["resourceSliceCount"] for each in cluster.seen()]
        assert counts == [len(target.slices)] * len(target.slices)


def test_the_order_of_devices_matters():
    cluster = Cluster()
    cluster.publish(pool("ab"))

    assert cluster.publish(pool("ba")) == 1
    assert cluster.published() == ["ba"]


@pytest.mark.point(70)
def test_slices_of_other_drivers_and_nodes_are_left_alone_and_old_ones_of_ours_go():
    cluster = Cluster()
    cluster.publish(pool("ab"))
    (ours,) = cluster.seen()
    others: dict[str, dict[str, Any]] = {
        "other-driver": {"driver": "other.example.com"},
        "other-node": {"nodeName": "n2"},
        "other-pool": {"pool": {"name": "n1/old", "generation": 9, "resourceSliceCount": 1}},
    }
    for name, changes in others.items():
        cluster.add({**ours, "spec": {**ours["spec"], **changes}}, name)
    cluster.add(ours, "no-index")
    cluster.add(ours, "00007-gpu.example.com-n1-beyond")
    cluster.add(ours, "00000-gpu.example.com-n1-zzzzz-twin")

    assert cluster.publish(pool("ab")) == 4
    assert set(cluster.slices) == {ours["metadata"]["name"], "other-driver", "other-node"}


def test_what_others_wrote_beside_the_spec_stays():
    cluster = Cluster()
    cluster.publish(pool("ab"))
    (name,) = cluster.slices
    cluster.slices[name]["metadata"] |= {"labels": {"team": "x"}, "managedFields": [{}]}

    (update,) = plan_writes(pool("ac"), cluster.seen(), HOME).update

    assert update["metadata"]["labels"] == {"team": "x"}
    assert "managedFields" not in update["metadata"]


def test_a_node_that_was_created_anew_becomes_the_owner():
    cluster = Cluster()
    cluster.publish(pool("ab"))
    anew = SliceOwner(HOME.driver, HOME.node, "uid-of-the-new-n1")

    (update,) = plan_writes(pool("ab"), cluster.seen(), anew).update

    assert update["metadata"]["ownerReferences"] == [anew.owner]


def test_a_foreign_field_in_our_slice_is_removed():
    cluster = Cluster()
    cluster.publish(pool("ab"))
    (name,) = cluster.slices
    cluster.slices[name]["spec"]["skipNodeOperations"] = ["*"]

    (update,) = plan_writes(pool("ab"), cluster.seen(), HOME).update

    assert "skipNodeOperations" not in update["spec"]


@pytest.mark.point(64)
@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        pytest.param({}, [128, 128, 44], id="plain"),
        pytest.param({"taints": [{"key": "k"}]}, [64, 64, 64, 64, 44], id="one taint"),
        pytest.param({"consumesCounters": [{}]}, [64, 64, 64, 64, 44], id="one counter"),
        pytest.param({"attributes": {"a": {"ints": [1]}}}, [64, 64, 64, 64, 44], id="one list"),
        pytest.param({"attributes": {"a": {"int": 1}}}, [128, 128, 44], id="an attribute"),
    ],
)
def test_devices_are_split_in_order_as_many_to_a_slice_as_it_takes(more, sizes):
    devices = [device(f"d{i}", **(more if i == 200 else {})) for i in range(300)]

    split = split_into_slices("n1", devices)

    assert [len(each.devices) for each in split.slices] == sizes
    assert list(split.devices) == devices


def test_counter_sets_have_slices_of_their_own_of_eight_each():
    counters = [{"name": f"c{i}"} for i in range(9)]

    split = split_into_slices("n1", [device("a")], counters)

    assert [len(each.shared_counters) for each in split.slices] == [8, 1, 0]
    assert [len(each.devices) for each in split.slices] == [0, 0, 1]


def taking(name, counters):
    """A device that takes of this counter set, or of none."""
    consumed = [{"counterSet": counters, "counters": {"c": {"value": "1"}}}] if counters else []
    return device(name, **({"consumesCounters": consumed} if consumed else {}))


def gpus(wholes, sizes, others):
    """GPUs that are tried whole, then their parts, then devices beside them."""
    sets = [f"c{number}" for number in range(len(sizes))]
    devices = [
        *(taking(f"{name}-whole", name) for name in sets if wholes),
        *(
            taking(f"{name}-{part}", name)
            for name, size in zip(sets, sizes, strict=True)
            for part in range(size)
        ),
        *(taking(f"other-{number}", "") for number in range(others)),
    ]
    counters = [{"name": name, "counters": {"c": {"value": "9"}}} for name in sets]
    return devices, counters


@given(
    wholes=st.booleans(), sizes=st.lists(st.integers(0, 70), max_size=20), others=st.integers(0, 70)
)
def test_devices_that_take_of_counters_are_split_in_order_into_few_slices(wholes, sizes, others):
    devices, counters = gpus(wholes, sizes, others)

    split = split_into_slices("n1", devices, counters)

    assert list(split.devices) == devices
    assert validate_pool(split) == ()
    least = -(-len(devices) // (64 if any(map(is_advanced, devices)) else 128))
    number = sum(bool(part.devices) for part in split.slices)
    assert least <= number <= least + max(1, least // 3)


@given(
    wholes=st.booleans(),
    number=st.integers(1, 16),
    size=st.integers(2, 16),
    others=st.integers(0, 16),
    data=st.data(),
)
def test_what_becomes_of_the_parts_of_one_gpu_changes_one_slice(wholes, number, size, others, data):
    assume(number > 1)  # else the largest is another one
    which = data.draw(st.integers(0, number - 1))
    fewer = data.draw(st.integers(2, size))
    before = split_into_slices("n1", *gpus(wholes, [size] * number, others))
    sizes = [fewer if place == which else size for place in range(number)]
    assume(len(before.slices) > 1 and whole_groups(before))

    after = split_into_slices("n1", *gpus(wholes, sizes, others))

    assume(whole_groups(after))
    changed = [part for part, now in zip(before.slices, after.slices, strict=True) if part != now]
    assert len(changed) == (fewer != size)


def whole_groups(pool):
    """Whether no counter set's parts are in two slices: that would take many more slices."""
    names = [
        {d["name"].split("-")[0] for d in part.devices if not d["name"].endswith("whole")}
        - {"other"}
        for part in pool.slices
    ]
    return len(set().union(*names)) == sum(map(len, names))


def test_sixteen_gpus_are_published_four_to_a_slice_and_what_is_beside_them_fills_the_last():
    split = split_into_slices("n1", *gpus(False, [14] * 16, 16))

    assert [len(part.devices) for part in split.slices[2:]] == [56, 56, 56, 64, 8]


def test_the_parts_of_one_gpu_that_no_slice_has_room_for_are_in_several():
    split = split_into_slices("n1", *gpus(False, [2, 65], 0))

    assert [len(part.devices) for part in split.slices[1:]] == [64, 3]


def test_a_part_that_takes_of_no_counter_stays_with_its_gpu():
    devices, counters = gpus(False, [30, 30, 30], 1)
    free = devices[33] | {"consumesCounters": []}

    split = split_into_slices("n1", [*devices[:33], free, *devices[34:]], counters)

    assert [len(part.devices) for part in split.slices[1:]] == [60, 31]


TAINT = {"key": "k", "effect": "NoExecute"}


def tainted(**more):
    return Pool("n1", (SliceContent((device("a", taints=[TAINT | more]),)),))


@pytest.mark.point(77)
@pytest.mark.parametrize(
    ("taint", "writes"),
    [
        pytest.param({}, 0, id="no opinion on the time"),
        pytest.param({"timeAdded": "2026-01-01T00:00:01Z"}, 0, id="a second off"),
        pytest.param({"timeAdded": "2026-01-01T00:00:00.7+00:00"}, 0, id="written otherwise"),
        pytest.param({"timeAdded": "2026-01-02T00:00:00Z"}, 1, id="another time"),
        pytest.param({"value": "v"}, 1, id="another value"),
        pytest.param({"value": ""}, 0, id="an empty value is none"),
    ],
)
def test_a_taint_is_the_same_whatever_second_it_was_added(taint, writes):
    cluster = Cluster()
    cluster.publish(tainted(timeAdded="2026-01-01T00:00:00Z"))

    assert cluster.publish(tainted(**taint)) == writes


@pytest.mark.point(77)
def test_a_taint_keeps_its_time_when_its_slice_is_written_and_when_it_moves():
    cluster = Cluster()
    cluster.publish(tainted(timeAdded="2026-01-01T00:00:00Z"))
    moved = Pool("n1", (SliceContent((device("b"),)), SliceContent((device("a", taints=[TAINT]),))))
    cluster.publish(moved)

    (times,) = [
        taint["timeAdded"]
        for each in cluster.seen()
        for published in each["spec"]["devices"]
        for taint in published.get("taints", ())
    ]
    assert times == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ({"capacity": {"m": {"value": "1024Mi"}}}, {"capacity": {"m": {"value": "1Gi"}}}),
        ({"attributes": {}, "taints": [], "consumesCounters": None}, {}),
        (
            {"capacity": {"m": {"value": "2Gi", "requestPolicy": {"validValues": ["1024Mi"]}}}},
            {"capacity": {"m": {"value": "2Gi", "requestPolicy": {"validValues": ["1Gi"]}}}},
        ),
        (
            {"consumesCounters": [{"counterSet": "c", "counters": {"m": {"value": "1000"}}}]},
            {"consumesCounters": [{"counterSet": "c", "counters": {"m": {"value": "1k"}}}]},
        ),
    ],
)
def test_what_the_api_server_writes_otherwise_is_the_same(sent, stored):
    cluster = Cluster()
    cluster.publish(Pool("n1", (SliceContent((device("a", **stored),)),)))

    assert cluster.publish(Pool("n1", (SliceContent((device("a", **sent),)),))) == 0


def test_false_is_a_value_and_no_empty_field():
    cluster = Cluster()
    cluster.publish(pool("a"))
    with_false = Pool("n1", (SliceContent((device("a", attributes={"x": {"bool": False}}),)),))

    assert cluster.publish(with_false) == 1


@pytest.mark.parametrize("done", range(6))
@pytest.mark.parametrize(
    ("before", "target"),
    [
        pytest.param(pool("ab", "cd", "ef"), pool("ac", "bd", "ef"), id="one stays"),
        pytest.param(pool("ab", "cd", "ef"), pool("ef", "cd", "ab"), id="two swap"),
        pytest.param(pool("ab"), pool("ab", "cd", "ef"), id="more"),
        pytest.param(pool("ab", "cd", "ef"), pool("ab"), id="fewer"),
        pytest.param(pool("ab", "cd", "ef"), pool("abcdef"), id="all into one"),
    ],
)
def test_whoever_died_between_two_writes_the_next_process_finishes(before, target, done):
    cluster = Cluster()
    cluster.publish(before)
    for number, _ in enumerate(cluster.steps(plan_writes(target, cluster.seen(), HOME))):
        if number == done:
            break
    cluster.publish(target)

    assert cluster.visible() == [each["name"] for each in target.devices]
    assert len(cluster.slices) == len(target.slices)


CONTENTS = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=4), min_size=1, max_size=4).map(
    lambda lists: pool(*_each_once(lists))
)


def _each_once(lists):
    used = set()
    for names in lists:
        new = [name for name in dict.fromkeys(names) if name not in used]
        used.update(new)
        yield "".join(new)


@given(st.lists(CONTENTS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_every_step_from_pool_to_pool_is_safe_and_ends_where_it_should(pools, chance):
    """Also where the process dies between two writes and the next one begins with what is there."""
    cluster = Cluster()
    for target in pools:
        before = cluster.visible()
        writes = plan_writes(target, cluster.seen(), HOME)
        die_after = chance.choice([None, 0, 1, 2])
        for number, _ in enumerate(cluster.steps(writes), 1):
            names = [each["name"] for each in target.devices]
            if (visible := cluster.visible()) is not None:
                assert visible == before or sorted(visible) == sorted(names)
                assert len(set(visible)) == len(visible)
            if number == die_after:
                break
    cluster.publish(pools[-1])

    assert cluster.published() == ["".join(d["name"] for d in s.devices) for s in pools[-1].slices]
    assert cluster.visible() is not None
    assert cluster.publish(pools[-1]) == 0


def _edit(spec, chance):
    """Something that a person might do to a slice with kubectl edit."""
    match chance.randrange(6):
        case 0:
            spec["pool"]["generation"] = chance.randrange(50)
        case 1:
            spec["pool"]["resourceSliceCount"] = chance.randrange(1, 9)
        case 2:
            spec["devices"] = [device("z"), *spec.get("devices", ())]
        case 3:
            spec.pop("devices", None)
        case 4:
            spec["sharedCounters"] = [{"name": "c", "counters": {"m": {"value": "1"}}}]
        case 5:
            spec["devices"] = list(reversed(spec.get("devices", ())))


@pytest.mark.point(69)
@given(CONTENTS, st.randoms(use_true_random=False))
def test_what_people_do_to_our_slices_is_healed_at_once(target, chance: random.Random):
    cluster = Cluster()
    cluster.publish(target)
    for name in sorted(cluster.slices):
        match chance.randrange(4):
            case 0:
                del cluster.slices[name]
            case 1:
                _edit(cluster.slices[name]["spec"], chance)
            case 2:
                cluster.add(cluster.slices[name], f"{name}-copy")
    cluster.publish(target)

    assert cluster.published() == ["".join(d["name"] for d in s.devices) for s in target.slices]
    assert sorted(cluster.visible()) == sorted(each["name"] for each in target.devices)
    assert cluster.publish(target) == 0
