"""A board and its reconciler; a node that prepares claims; an API server in memory."""

import pytest

from tests.fakes.boards import AMPERE, Board, Boards
from tests.fakes.connected import client, server
from tests.plugin.mig.reconciler import Scene
from tests.plugin.mig.world import World

__all__ = ["client", "server"]


@pytest.fixture
def board():
    """It needs a reset for MIG mode."""
    return Board(AMPERE)


@pytest.fixture
def scene(board, tmp_path):
    return Scene(Boards(board), tmp_path)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)
