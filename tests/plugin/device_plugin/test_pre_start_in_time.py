"""How long PreStartContainer may take: after 30 s the kubelet gives it up, and nobody reads why."""

import contextlib

import pytest

from dra_driver.base.deadlines import seconds_within_request
from dra_driver.base.errors import TimedOut
from dra_driver.model.profiles import SharingStrategy
from tests.fakes.allocations import GPU, AllocationWorld, replica


def test_every_wait_ends_before_the_kubelet_gives_up(tmp_path):
    world = AllocationWorld(tmp_path, replicas=4, default_strategy=SharingStrategy.MPS)
    world.node.protocol, world.pre_start_seconds = 2, 3.0
    waits: list[float] = []

    @contextlib.contextmanager
    def lease(seconds):
        waits.append(seconds)
        yield

    def agent_does_not_answer(step):
        waits.append(seconds_within_request(20.0))
        raise TimedOut("waited for the MPS agent")

    world.start(lease=lease, mps_dir="/run/mps")
    world.admit("train", replica(0))
    world.preparer.take_back_if(world.recorded(replica(0)).claim, lambda: True)  # it is lost
    waits.clear()
    world.node.before_step = agent_does_not_answer

    with pytest.raises(TimedOut, match="waited for the MPS agent"):
        world.allocations.pre_start(GPU, [replica(0)])

    assert len(waits) > 3
    assert max(waits) <= 3.0
