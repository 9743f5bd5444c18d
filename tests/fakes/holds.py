"""What claims hold, without a disk."""

from dra_driver.node.state.ledger import Ledger
from dra_driver.plan.mig.partitions import created_partitions


class FakeHolds(Ledger):
    """A ledger that says what a test has told it."""

    def __init__(self, holdings=None):
        self._held = holdings or {}
        self._before = []

    def set(self, holdings):
        self._before.append(created_partitions(self._held))
        self._held = holdings

    def held(self):
        return self._held

    def mark(self):
        return len(self._before)

    def partitions_since(self, mark):
        return created_partitions(self._held).union(*self._before[mark:])
