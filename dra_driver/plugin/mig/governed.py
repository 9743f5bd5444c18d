"""The profile as it counts for what is offered: what layouts govern is not cut for claims."""

from collections.abc import Callable, Sequence

from dra_driver.errors import ClusterError
from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.governed import until_known, without_cutting

_Known = tuple[tuple[Gpu, ...], frozenset[GpuUuid]]


class Governed:
    """For many threads. The same profile as long as nothing of it changed."""

    def __init__(self, profile: Callable[[], Profile]) -> None:
        """*profile*: the one in force."""
        self._profile = profile
        self._known: _Known | None = None
        self._last: tuple[Profile, _Known | bool, Profile] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.expected: Callable[[], bool] = lambda: False
        """Whether any GPU may be governed, as long as nothing was told."""

    def tell(self, gpus: Sequence[Gpu], governed: frozenset[GpuUuid]) -> None:
        """Of these *gpus* layouts say something of those that are *governed*."""
        before, self._known = self._known, (tuple(gpus), governed)
        if before is None or before[1] != governed:
            self.on_change()

    def profile(self) -> Profile:
        """Raises what *profile* raises."""
        profile, known, last = self._profile(), self._known or self.expected(), self._last
        if last is not None and last[0] is profile and last[1] is known:
            return last[2]
        found = _of(profile, known)
        if last is not None and found == last[2]:
            found = last[2]  # who compares takes it for the same
        self._last = (profile, known, found)
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


def _of(profile: Profile, known: _Known | bool) -> Profile:
    if isinstance(known, bool):
        return until_known(profile) if known else profile
    return without_cutting(profile, *known)
