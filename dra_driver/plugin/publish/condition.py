"""What is reported of the profile of this node, for its condition ``GPUsConfigured``."""

from collections.abc import Collection, Iterator

from dra_driver.base.errors import Unreachable
from dra_driver.model.node_profiles import NodeReport
from dra_driver.model.offer import Offer
from dra_driver.plan.device_plugin.resources import ResourceNames, resources
from dra_driver.plugin.publish.profiles import ActiveProfileState


def node_report(
    state: ActiveProfileState,
    scanned_at: float,
    pending_gpus: Collection[str],
    not_possible: Collection[str] = (),
) -> NodeReport | None:
    """What is to be reported; None: what was reported before, until more is known.

    *scanned_at*: when the scan began whose offer counts, with *pending_gpus*. A profile is in force
    once it is in an offer. *not_possible*: what of it is not so, and why.
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
        not_possible="; ".join(not_possible),
    )


def not_offered_so(offer: Offer) -> Iterator[str]:
    """A line for each reason why devices are not offered as the profile says, though no claim holds
    them."""
    devices: dict[str, list[str]] = {}
    for change in offer.pending:
        if change.reason:
            devices.setdefault(change.reason, []).append(change.device)
    for reason, names in devices.items():
        yield f"{', '.join(names)}: {reason}"


class UnlistedDevices:
    """What of an offer the kubelet is not told by the device-plugin API, and why; found once for
    each offer."""

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self._last: tuple[Offer, tuple[str, ...]] | None = None

    def problems(self, offer: Offer) -> tuple[str, ...]:
        if self._last is None or self._last[0] is not offer:
            self._last = (offer, resources(offer, self._names, ()).problems)
        return self._last[1]
