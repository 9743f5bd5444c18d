"""A node whose health is watched; an API server in memory."""

import pytest

from tests.fakes.connected import client, server
from tests.plugin.health.world import World

__all__ = ["client", "server"]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)
