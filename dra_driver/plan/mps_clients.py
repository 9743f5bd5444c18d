"""Whose the clients of MPS servers are.

Protocol 3 tells of which space a client is. Protocol 2 does not: the only space of a server has all
its clients, and of several a client's are those that its pod uses. Where that leaves more than one,
nobody can tell: the client counts for none of them, and how many they have is not known.
"""

from collections.abc import Collection, Mapping, Set

from dra_driver.kubeletplugin.claims import PodUid
from dra_driver.model.mps import MpsServer, MpsStatus, SpaceName

Owners = Mapping[int, frozenset[SpaceName]]
"""Of each client, by the host's number, the spaces of which it may be."""


def untold(status: MpsStatus) -> frozenset[int]:
    """The clients of whom only their pod can tell whose they are."""
    return frozenset(
        client.pid
        for server in status.servers
        if len(server.spaces) > 1
        for client in server.clients
        if client.space is None
    )


def owners(
    server: MpsServer,
    users: Mapping[SpaceName, Collection[PodUid]],
    pods: Mapping[int, PodUid],
) -> Owners:
    """*users*: the pods that use each space; *pods*: of clients, where that was found out."""
    every = frozenset(served.space.name for served in server.spaces)

    def of_pod(pod: PodUid | None) -> frozenset[SpaceName]:
        its = frozenset(name for name in every if pod in users.get(name, ()))
        return its or every  # of a pod that we were not told of yet, too

    return {
        client.pid: of_pod(pods.get(client.pid))
        if client.space is None
        else frozenset({client.space})
        for client in server.clients
    }


def clients_of(spaces: Set[SpaceName], whose: Owners) -> frozenset[int] | None:
    """The clients that these spaces have together. None: one may be theirs or another's."""
    mine = {pid: its for pid, its in whose.items() if its & spaces}
    return frozenset(mine) if all(its <= spaces for its in mine.values()) else None
