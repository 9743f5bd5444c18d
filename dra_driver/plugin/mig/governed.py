"""The profile as it counts for what is offered: what layouts govern is not cut for claims."""

from collections.abc import Callable, Sequence

from dra_driver.model.devices import Gpu, GpuUuid
from dra_driver.model.profiles import Profile
from dra_driver.plan.mig.governed import without_cutting

_Known = tuple[tuple[Gpu, ...], frozenset[GpuUuid]]


class Governed:
    """For many threads. The same profile as long as nothing of it changed."""

    def __init__(self, profile: Callable[[], Profile]) -> None:
        """*profile*: the one in force."""
        self._profile = profile
        self._known: _Known = ((), frozenset())
        self._last: tuple[Profile, _Known, Profile] | None = None
        self.on_change: Callable[[], None] = lambda: None

    def tell(self, gpus: Sequence[Gpu], governed: frozenset[GpuUuid]) -> None:
        """Of these *gpus* layouts say something of those that are *governed*."""
        before, self._known = self._known, (tuple(gpus), governed)
        if before[1] != governed:
            self.on_change()

    def profile(self) -> Profile:
        """Raises what *profile* raises."""
        profile, known, last = self._profile(), self._known, self._last
        if last is not None and last[0] is profile and last[1] is known:
            return last[2]
        found = without_cutting(profile, *known)
        if last is not None and found == last[2]:
            found = last[2]  # who compares takes it for the same
        self._last = (profile, known, found)
        return found
