"""The API server in memory, and its client."""

from tests.fakes.connected import client, server

__all__ = ["client", "server"]
