"""Which spaces are made again because somebody changed them, and how often at most."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from dra_driver.model.mps import Space, SpaceName
from dra_driver.plan.mps_servers import Strays, said

_MOST: Final = 3  # times that one agent makes a space again: it may misread what the daemon says


class Mending:
    """Of one server."""

    def __init__(self) -> None:
        self._times: Counter[SpaceName] = Counter()

    def due(self, strays: Strays) -> Iterator[tuple[Space, str]]:
        """Each space, and why."""
        for space in strays.missing:
            if self._again(space):
                yield space, "it was removed"
        for space, found in strays.loose:
            if self._again(space):
                wanted = said(space.allowance)
                yield space, f"its limits were changed: {said(found)} instead of {wanted}"

    def _again(self, space: Space) -> bool:
        self._times[space.name] += 1
        return self._times[space.name] <= _MOST
