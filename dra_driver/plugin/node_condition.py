"""A condition of the own Node, kept as somebody says."""

import logging
import random
from collections.abc import Callable
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient
from dra_driver.k8s.events import timestamp
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.plan.node_conditions import NodeCondition, condition_of

log = logging.getLogger(__name__)

_CHECK_SECONDS = 600.0  # at most, until it is looked whether the condition is still there
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 300.0  # until a failed write is tried again


class ConditionWriter:
    """Writes the condition when it changes, and again where it is gone, on a thread of its own:
    nothing waits for it. A failed write is tried again."""

    def __init__(
        self,
        api: ApiClient,
        node: NodeLabels,
        type_: str,
        condition: Callable[[], NodeCondition | None],
        is_newest: Callable[[], bool] = lambda: True,
    ) -> None:
        """*condition*: what the condition of this type is to say; None: what it says. *is_newest*:
        whether no newer process of the plugin runs, which writes it then."""
        self._api = api
        self._node = node
        self._path = f"/api/v1/nodes/{node.node}"
        self._type = type_
        self._condition = condition
        self._is_newest = is_newest
        self._wanted: NodeCondition | None = None
        self._due: tuple[str, NodeCondition] | None = None  # and the UID of the Node
        self._written: tuple[str, NodeCondition] | None = None
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS, randomized=True)
        self._logged_error = ""
        self.loop: Final = Loop(f"condition-{type_}", self.write, _CHECK_SECONDS)

    def update(self) -> None:
        """It may say something else, or the Node may be another one: have it written soon."""
        condition = self._condition()
        if condition is not None:
            self._wanted = condition
        due = (self._node.uid, self._wanted) if self._wanted else None
        if due != self._due:  # else it is written, or will be tried again in its time
            self._due = due
            self.loop.soon()

    def write(self) -> float:
        """Write the condition, if it is not there. Returns the seconds until that is looked at."""
        wanted = self._wanted
        if wanted is None or not self._is_newest():
            return UNTIL_WOKEN if wanted is None else _CHECK_SECONDS
        try:
            self._write(self._node.uid, wanted)
        except ApiServerError as e:
            if str(e) != self._logged_error:
                log.warning("the condition %s is not on the Node: %s", self._type, e)
            self._logged_error = str(e)
            return self._backoff.next_seconds()
        self._logged_error = ""
        self._backoff.reset()
        return _CHECK_SECONDS * random.uniform(0.75, 1.0)  # nodes that began together drift apart

    def _write(self, uid: str, wanted: NodeCondition) -> None:
        written, self._written = self._written, None
        if written is not None and written[0] == uid and written[1] != wanted:
            status = written[1].status
        else:
            there = condition_of(self._api.get(self._path), self._type)
            status = str(there.get("status"))
            said = NodeCondition(status, there.get("reason", ""), there.get("message", ""))
            if said == wanted and "lastHeartbeatTime" in there:  # older releases wrote none
                self._written = (uid, wanted)
                return
        now = timestamp()
        condition = {
            "type": self._type,
            "status": wanted.status,
            "reason": wanted.reason,
            "message": wanted.message,
            "lastHeartbeatTime": now,  # without one, `kubectl describe` shows the year 1
        }
        if status != wanted.status:
            condition["lastTransitionTime"] = now
        self._api.patch(
            f"{self._path}/status",
            {"status": {"conditions": [condition]}},
            content_type=STRATEGIC_MERGE_PATCH,
        )
        self._written = (uid, wanted)
