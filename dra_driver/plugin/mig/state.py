"""The label of the own Node that says how far its layout is."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from api.names import MIG_STATE_LABEL
from dra_driver.errors import ClusterError
from dra_driver.model.layouts import State
from dra_driver.plugin.node_labels import Labels
from dra_driver.process.loops import Loop

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 10.0


class Api(Protocol):
    """What we use of the API server."""

    def patch(self, path: str, patch: dict[str, Any]) -> Mapping[str, Any]: ...


class MigState:
    """Writes the label when it is another one, on a thread of its own: an API server that is away
    keeps nobody waiting, and is asked again."""

    def __init__(
        self, api: Api, node: str, labels: Callable[[], Labels], ours: bool = False
    ) -> None:
        """*labels*: as they are on the Node now; ClusterError: not known. *ours*: whether the label
        may be one that an earlier process of ours wrote."""
        self._api = api
        self._node = node
        self._labels = labels
        self._wanted: State | None = None
        self._ours = ours
        self._told = False
        self._logged = ""
        self._loop = Loop("mig-state", self.write, _AGAIN_SECONDS)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def tell(self, state: State | None) -> None:
        """Have *state* on the Node soon; None: no layout is wanted, and what we wrote goes."""
        if state is not self._wanted or not self._told:
            self._wanted, self._told = state, True
            self._loop.soon()

    def look_soon(self) -> None:
        """The labels are others now: ours may be gone with a Node that registered again."""
        self._loop.soon()

    def write(self) -> None:
        """Write it now, if it is not there."""
        wanted = self._wanted
        if not self._told:
            return
        try:
            there = self._labels().get(MIG_STATE_LABEL)
            if there == wanted or (wanted is None and not self._ours):
                return
            value = wanted and wanted.value
            patch = {"metadata": {"labels": {MIG_STATE_LABEL: value}}}
            self._api.patch(f"/api/v1/nodes/{self._node}", patch)
        except ClusterError as e:
            if str(e) != self._logged:
                log.warning("the state of the layout is not on the Node: %s", e)
            self._logged = str(e)
            return
        self._ours = wanted is not None
        self._logged = ""
