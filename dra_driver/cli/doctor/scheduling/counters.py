"""Can the requests of one claim be served together? Partitions of a GPU are in each other's way.

Every choice of devices is tried, node by node, against the counters that keep them apart (KEP-4815)
and the attributes that have to match. Other claims count for nothing, nor does how much two
requests take of the same device. After so many steps that nobody would wait for more, the answer is
yes: only what is certain is told.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any

from dra_driver.cli.doctor.scheduling.published_devices import Counter, PublishedDevice

Document = Mapping[str, Any]

_STEPS = 20_000  # of one claim: some hundredths of a second


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request: *number* different ones of *devices*."""

    name: str  # of the request, with its subrequest
    number: int
    devices: Sequence[PublishedDevice]


def fit_together(
    requests: Sequence[Sequence[Candidate]],
    counters: Mapping[str, Mapping[Counter, Fraction]],
    constraints: Sequence[Document] = (),
) -> bool:
    """Whether some node can serve all *requests*, each in one of its ways. *counters*: how much
    there is, by node; *constraints*: as in the claim."""
    steps = count()
    nodes = sorted({device.node for ways in requests for way in ways for device in way.devices})
    return any(
        _Search(node, requests, constraints, steps).finds(dict(counters.get(node, {})))
        for node in nodes
    )


class _Search:
    """All choices on one node, depth first."""

    def __init__(
        self,
        node: str,
        requests: Sequence[Sequence[Candidate]],
        constraints: Sequence[Document],
        steps: Iterator[int],
    ) -> None:
        self._requests = [
            [
                Candidate(way.name, way.number, [one for one in way.devices if one.node == node])
                for way in ways
            ]
            for ways in requests
        ]
        self._takes = {
            one.name: one.takes for ways in self._requests for way in ways for one in way.devices
        }
        self._constraints = constraints
        self._steps = steps
        self._chosen: list[tuple[str, PublishedDevice]] = []

    def finds(self, left: dict[Counter, Fraction], at: int = 0) -> bool:
        if at == len(self._requests):
            return True
        return any(self._more(way, way.number, 0, left, at) for way in self._requests[at])

    def _more(
        self, way: Candidate, number: int, start: int, left: dict[Counter, Fraction], at: int
    ) -> bool:
        """*number* more devices of *way*, from its *start*-th on; then the next requests."""
        if number == 0:
            return self.finds(left, at + 1)
        for place in range(start, len(way.devices) - number + 1):
            if next(self._steps) >= _STEPS:
                return True
            device = way.devices[place]
            rest = self._without(device, left)
            if rest is None or not self._matches(way.name, device):
                continue
            self._chosen.append((way.name, device))
            if self._more(way, number - 1, place + 1, rest, at):
                return True
            self._chosen.pop()
        return False

    def _without(
        self, device: PublishedDevice, left: dict[Counter, Fraction]
    ) -> dict[Counter, Fraction] | None:
        """What is *left* of the counters beside *device*; None: it cannot be had any more."""
        if any(one.name == device.name for _, one in self._chosen):
            return left if device.document.get("allowMultipleAllocations") else None
        rest = dict(left)
        for counter, amount in self._takes[device.name].items():
            rest[counter] = rest.get(counter, Fraction(0)) - amount
            if rest[counter] < 0:
                return None
        return rest

    def _matches(self, name: str, device: PublishedDevice) -> bool:
        for constraint in self._constraints:
            attribute = constraint.get("matchAttribute")
            if not attribute or not _concerns(constraint, name):
                continue
            others = [one for other, one in self._chosen if _concerns(constraint, other)]
            if others and _differ(others[0].attribute(attribute), device.attribute(attribute)):
                return False
        return True


def _differ(one: Any, other: Any) -> bool:
    """Of lists (KEP-5491) some part has to match, and that is not asked here."""
    return not isinstance(one, list) and not isinstance(other, list) and one != other


def _concerns(constraint: Document, name: str) -> bool:
    """Whether it is for the request *name*, which can be one of several ways to serve another."""
    names = constraint.get("requests") or ()
    return not names or name in names or name.partition("/")[0] in names
