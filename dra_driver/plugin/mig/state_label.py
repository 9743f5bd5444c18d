"""The label of the own Node that says how far its layout is."""

import logging
import time
from collections.abc import Callable

from api.names import MIG_STATE_LABEL
from dra_driver.base.errors import ApiServerError
from dra_driver.base.threads import Loop
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.node_labels import Labels
from dra_driver.model.mig_layouts import LayoutState

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 10.0
_SOON_SECONDS = 0.1

PublishedSince = Callable[[float], bool]
"""Whether the API server has the GPUs as they are since a moment of the monotonic clock."""


class MigStateLabel:
    """Writes the label when it is another one, on a thread of its own: an API server that is away
    keeps nobody waiting, and is asked again.

    Who waits for success creates pods next: it is told once the slices are as the layout has it.
    """

    def __init__(
        self,
        api: KubernetesApi,
        node: str,
        labels: Callable[[], Labels],
        ours: bool = False,
        published: PublishedSince = lambda since: True,
    ) -> None:
        """*labels*: as they are on the Node now; ClusterError: not known. *ours*: whether the label
        may be one that an earlier process of ours wrote."""
        self._api = api
        self._node = node
        self._labels = labels
        self._published = published
        self._wanted: LayoutState | None = None
        self._since = 0.0  # when that was told
        self._changing = False  # something else was told before success, and that not written yet
        self._ours = ours
        self._told = False
        self._logged = ""
        self._loop = Loop("mig-state", self.write, _AGAIN_SECONDS)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def tell(self, state: LayoutState | None) -> None:
        """Have *state* on the Node soon; None: no layout is wanted, and what we wrote goes."""
        if state is not self._wanted or not self._told:
            self._changing |= state in (LayoutState.PENDING, LayoutState.FAILED)
            self._since = time.monotonic()
            self._wanted, self._told = state, True
            self._loop.soon()

    def look_soon(self) -> None:
        """The labels are others now: ours may be gone with a Node that registered again."""
        self._loop.soon()

    def write(self) -> float | None:
        """Write it now, if it is not there. Seconds: it is for later, and not yet true."""
        if not self._told:
            return None
        wanted, since = self._wanted, self._since
        if wanted is not LayoutState.SUCCESS or not self._changing:
            self._write(wanted)
        elif not self._published(since):
            return _SOON_SECONDS if self._write(LayoutState.PENDING) else None
        elif self._write(wanted):
            self._changing = wanted is not self._wanted  # something may be told meanwhile
        return None

    def _write(self, wanted: LayoutState | None) -> bool:
        """Whether it is there now."""
        try:
            there = self._labels().get(MIG_STATE_LABEL)
            if there == wanted or (wanted is None and not self._ours):
                return True
            value = wanted and wanted.value
            patch = {"metadata": {"labels": {MIG_STATE_LABEL: value}}}
            self._api.patch(f"/api/v1/nodes/{self._node}", patch)
        except ApiServerError as e:
            if str(e) != self._logged:
                log.warning("the state of the layout is not on the Node: %s", e)
            self._logged = str(e)
            return False
        self._ours = wanted is not None
        self._logged = ""
        return True
