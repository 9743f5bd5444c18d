"""The condition of the own Node that says what became of its profile: ``GPUsConfigured``."""

import logging
import random
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from api.names import GPUS_CONFIGURED
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, Unreachable
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.k8s.client import STRATEGIC_MERGE_PATCH, ApiClient
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.model.node_profiles import NodeReport
from dra_driver.plan.profiles.report import ReportCondition, report_condition
from dra_driver.plugin.publish.profiles import ActiveProfileState

log = logging.getLogger(__name__)

_CHECK_SECONDS = 600.0  # at most, until it is looked whether the condition is still there
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 300.0  # until a failed write is tried again


def node_report(
    state: ActiveProfileState, scanned_at: float, pending_gpus: Collection[str]
) -> NodeReport | None:
    """What is to be reported; None: what was reported before, until more is known.

    *scanned_at*: when the scan began whose offer counts, with *pending_gpus*. A profile is in force
    once it is in an offer.
    """
    if state.selected is None or isinstance(state.problem, Unreachable):
        return None  # an outage is no refusal, which would stop a rollout
    if state.problem is not None:
        selected = state.selected
        refusal = str(state.problem) or type(state.problem).__name__
        return NodeReport(selected.name, selected.revision, selected.of_files, refusal=refusal)
    profile = state.profile
    if profile is None or scanned_at <= state.since:
        return None
    return NodeReport(
        profile.name,
        profile.revision,
        of_files=not profile.revision,
        pending=len(pending_gpus),
        pending_gpus=tuple(pending_gpus),
    )


class ConditionWriter:
    """Writes the condition when it changes, and again where it is gone, on a thread of its own:
    nothing waits for it. A failed write is tried again."""

    def __init__(
        self,
        api: ApiClient,
        node: NodeLabels,
        report: Callable[[], NodeReport | None],
        is_newest: Callable[[], bool] = lambda: True,
    ) -> None:
        """*report*: what the condition is to say; None: what it says. *is_newest*: whether no newer
        process of the plugin runs, which writes it then."""
        self._api = api
        self._node = node
        self._path = f"/api/v1/nodes/{node.node}"
        self._report = report
        self._is_newest = is_newest
        self._wanted: ReportCondition | None = None
        self._due: tuple[str, ReportCondition] | None = None  # and the UID of the Node
        self._written: tuple[str, ReportCondition] | None = None
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS, randomized=True)
        self._logged_error = ""
        self.loop: Final = Loop("condition", self.write, _CHECK_SECONDS)

    def update(self) -> None:
        """The report may be another one, or the Node: have it written soon."""
        report = self._report()
        if report is not None:
            self._wanted = report_condition(report)
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
                log.warning("the condition %s is not on the Node: %s", GPUS_CONFIGURED, e)
            self._logged_error = str(e)
            return self._backoff.next_seconds()
        self._logged_error = ""
        self._backoff.reset()
        return _CHECK_SECONDS * random.uniform(0.75, 1.0)  # nodes that began together drift apart

    def _write(self, uid: str, wanted: ReportCondition) -> None:
        written, self._written = self._written, None
        if written is not None and written[0] == uid and written[1] != wanted:
            status = written[1].status
        else:
            there = self._read()
            status = str(there.get("status"))
            if wanted == ReportCondition(status, there.get("reason", ""), there.get("message", "")):
                self._written = (uid, wanted)
                return
        condition: dict[str, Any] = {
            "type": GPUS_CONFIGURED,
            "status": wanted.status,
            "reason": wanted.reason,
            "message": wanted.message,
        }
        if status != wanted.status:
            condition["lastTransitionTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._api.patch(
            f"{self._path}/status",
            {"status": {"conditions": [condition]}},
            content_type=STRATEGIC_MERGE_PATCH,
        )
        self._written = (uid, wanted)

    def _read(self) -> dict[str, Any]:
        """The condition as it is; empty: there is none."""
        conditions = (self._api.get(self._path).get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if each.get("type") == GPUS_CONFIGURED), {})
