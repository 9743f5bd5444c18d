"""The profile as it counts for what is offered: what layouts govern is not cut for claims."""

from collections.abc import Callable, Sequence

from dra_driver.errors import ClusterError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.governed import until_known, until_seen, without_cutting

_Known = tuple[tuple[Gpu, ...], frozenset[GpuUuid]]


class Governed:
    """For many threads. The same profile as long as nothing of it changed."""

    def __init__(self, profile: Callable[[], Profile]) -> None:
        """*profile*: the one in force."""
        self._profile = profile
        self._known: _Known | None = None
        self._last: tuple[Profile, _Known | None, bool, Profile] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.expected: Callable[[], bool] = lambda: False
        """Whether any GPU may be governed of which nothing was told."""

    def tell(self, gpus: Sequence[Gpu], governed: frozenset[GpuUuid]) -> None:
        """Of these *gpus* layouts say something of those that are *governed*. Of any other it is
        not known: it was not there yet, or was away for a moment."""
        before, self._known = self._known, (tuple(gpus), governed)
        if before is None or _named(before) != _named(self._known):
            self.on_change()

    def profile(self) -> Profile:
        """Raises what *profile* raises."""
        profile, known, expected = self._profile(), self._known, self.expected()
        last = self._last
        if last is not None and last[0] is profile and last[1] is known and last[2] == expected:
            return last[3]
        found = _of(profile, known, expected)
        if last is not None and found == last[3]:
            found = last[3]  # who compares takes it for the same
        self._last = (profile, known, expected, found)
        return found


def is_expected(label: Callable[[], str], last: str | None) -> bool:
    """Whether a layout may be wanted of the whole node, by the *label* that names it.

    While that cannot be read, by what it *last* was (None: never known): partitions are kept back
    where one was wanted, and where nobody knows. A node that had none goes on without, however
    long the API server is away.
    """
    try:
        return bool(label())
    except ClusterError:
        return last != ""


def _named(known: _Known) -> tuple[frozenset[GpuUuid], frozenset[GpuUuid]]:
    gpus, governed = known
    return frozenset(gpu.uuid for gpu in gpus), governed


def _of(profile: Profile, known: _Known | None, expected: bool) -> Profile:
    if known is None:
        return until_known(profile) if expected else profile
    gpus, _ = known
    return until_seen(without_cutting(profile, *known), gpus, expected)
