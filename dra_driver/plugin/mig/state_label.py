"""The label of the own Node that says how far its layouts are."""

import logging
import time
from collections.abc import Callable
from typing import Final

from api.names import MIG_STATE_LABEL
from dra_driver.base.errors import ApiServerError
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.node_labels import Labels
from dra_driver.model.mig_layouts import LayoutState

log = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
_SOON_SECONDS = 0.1


class MigStateLabel:
    """Writes the label when it changes, on a thread of its own, so that nobody waits for the API
    server. A failed write is tried again.

    Whoever waits for success creates pods next, so success is written once the slices show the
    layout.
    """

    def __init__(
        self,
        api: ApiClient,
        node: str,
        labels: Callable[[], Labels],
        ours: bool = False,
        published: Callable[[float], bool] = lambda since: True,
    ) -> None:
        """*labels*: as they are on the Node now; ApiServerError: not known. *ours*: whether an
        earlier process of ours may have written the label. *published*: whether the API server has
        the GPUs as they are since a moment of the monotonic clock."""
        self._api = api
        self._node = node
        self._labels = labels
        self._published = published
        # the state, and since when; None: nobody has told it yet
        self._known: tuple[LayoutState | None, float] | None = None
        self._changing = False  # another state came before success, and success is not written yet
        self._ours = ours
        self._logged_error = ""
        self.loop: Final = Loop("mig-state", self.write, _RETRY_SECONDS)

    def tell(self, state: LayoutState | None) -> None:
        """Have *state* on the Node soon; None: no layout is wanted, and what we wrote goes."""
        if self._known is None or state is not self._known[0]:
            self._changing |= state in (LayoutState.PENDING, LayoutState.FAILED)
            self._known = (state, time.monotonic())
            self.loop.soon()

    def write(self) -> float | None:
        """Write the label now, if it is not there. Seconds: when to write it, since it is not true
        yet; None: when it is time to try again."""
        if (known := self._known) is None:
            return UNTIL_WOKEN
        state, since = known
        if state is LayoutState.SUCCESS and self._changing and not self._published(since):
            return _SOON_SECONDS if self._write(LayoutState.PENDING) else None
        if not self._write(state):
            return None
        if state is LayoutState.SUCCESS:
            self._changing &= known is not self._known  # another one may have come meanwhile
        return UNTIL_WOKEN

    def _write(self, state: LayoutState | None) -> bool:
        """Whether it is there now."""
        try:
            current = self._labels().get(MIG_STATE_LABEL)
            if current == state or (state is None and not self._ours):
                return True
            value = state and state.value
            patch = {"metadata": {"labels": {MIG_STATE_LABEL: value}}}
            self._api.patch(f"/api/v1/nodes/{self._node}", patch)
        except ApiServerError as e:
            if str(e) != self._logged_error:
                log.warning("the state of the layout is not on the Node: %s", e)
            self._logged_error = str(e)
            return False
        self._ours = state is not None
        self._logged_error = ""
        return True
