"""Taints that come, change and go on devices of several slices, and the times that we give them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.kubeletplugin.slices.reconcile import plan_writes, split_into_slices
from tests.fakes.pool_rules import validate_pool
from tests.kubeletplugin.slices.cluster import HOME, Cluster

MONITOR = {"key": "gpu.nvidia.com/monitor", "effect": "NoSchedule"}  # no time of ours
API_SERVER_TIME = "2026-11-24T03:00:00Z"
TIMES = tuple(f"2026-11-2{day}T12:00:00Z" for day in range(4))

taint_lists = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["gpu.nvidia.com/xid", "gpu.nvidia.com/gpu-lost"]),
            "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
            "timeAdded": st.sampled_from(TIMES),
        },
        optional={"value": st.sampled_from(["79", "x" * 63])},
    ),
    unique_by=lambda taint: taint["key"],
    max_size=2,
)


class TimingCluster(Cluster):
    """As an API server, which adds the time to a taint that has none."""

    def steps(self, writes):
        for _ in super().steps(writes):
            for each in self.slices.values():
                for device in each["spec"].get("devices", ()):
                    for taint in device.get("taints", ()):
                        taint.setdefault("timeAdded", API_SERVER_TIME)
            yield

    def devices(self):
        return {d["name"]: d for each in self.slices.values() for d in each["spec"]["devices"]}


def node(gpus, shares, taints):
    """Each GPU in so many replicas, and monitors. *taints*: by GPU."""
    replicas = [
        {"name": f"gpu-{gpu}-{share}"} | ({"taints": taints[gpu]} if taints.get(gpu) else {})
        for gpu in range(gpus)
        for share in range(shares)
    ]
    monitors = [{"name": f"gpu-{gpu}-mon", "taints": [MONITOR]} for gpu in range(gpus)]
    return split_into_slices("n1", [*replicas, *monitors])


def written(taint):
    return {"timeAdded": API_SERVER_TIME} | taint


@given(
    shares=st.integers(1, 24),
    steps=st.lists(st.dictionaries(st.integers(0, 7), taint_lists), min_size=1, max_size=5),
)
def test_what_is_published_is_what_was_asked_for_last_with_our_times(shares, steps):
    """Whatever was published before; and then nothing more is written."""
    cluster = TimingCluster()
    for taints in steps:
        pool = node(8, shares, taints)
        cluster.publish(pool)

        assert validate_pool(pool) == ()
        assert cluster.visible() == [device["name"] for device in pool.devices]
        assert cluster.devices() == {
            device["name"]: {**device, "taints": list(map(written, device["taints"]))}
            if "taints" in device
            else device
            for device in pool.devices
        }
        assert cluster.publish(pool) == 0


@given(
    shares=st.integers(1, 24),
    steps=st.lists(st.dictionaries(st.integers(0, 7), taint_lists), min_size=2, max_size=5),
)
def test_taints_in_one_slice_are_one_update_and_none_moves_a_device(shares, steps):
    """So the generation stays, and the pool is complete all the while."""
    cluster = TimingCluster()
    cluster.publish(node(8, shares, steps[0]))
    for before, after in pairwise(node(8, shares, taints) for taints in steps):
        changed = sum(a != b for a, b in zip(before.slices, after.slices, strict=True))
        writes = plan_writes(after, cluster.seen(), HOME)
        cluster.apply(writes)

        assert len(writes.update) == (changed if changed < 2 else len(after.slices))
        assert len(writes) == len(writes.update)


@pytest.mark.parametrize(
    ("before", "after", "writes"),
    [
        pytest.param([], [TIMES[0]], 1, id="it comes"),
        pytest.param([TIMES[0]], [], 1, id="it goes"),
        pytest.param([TIMES[0]], [TIMES[1]], 1, id="it came again"),
        pytest.param([TIMES[0]], [TIMES[0]], 0, id="it stays"),
    ],
)
def test_a_taint_of_one_gpu_of_many_slices_is_at_most_one_write(before, after, writes):
    def taints(times):
        return {0: [{"key": "k", "effect": "NoExecute", "timeAdded": each} for each in times]}

    cluster = TimingCluster()
    cluster.publish(node(8, 20, taints(before)))

    assert cluster.publish(node(8, 20, taints(after))) == writes
    assert len(cluster.slices) == 3
