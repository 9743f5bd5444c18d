"""What is reported of the profile of this node, for its condition ``GPUsConfigured``."""

from collections.abc import Collection

from dra_driver.base.errors import Unreachable
from dra_driver.model.node_profiles import NodeReport
from dra_driver.plugin.publish.profiles import ActiveProfileState


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
