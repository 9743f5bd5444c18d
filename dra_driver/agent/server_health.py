"""The health of one server, from what its daemon answered, and when to retry a repair."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dra_driver.agent.dependencies import AgentClock
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import MpsClientStuck, TimedOut
from dra_driver.model.mps import MpsClient
from dra_driver.node.mps.daemon import DaemonStatus

STATUS_SECONDS: Final = 12.0  # between two checks of a server that is well: each runs a program
_STRIKES: Final = 2  # wrong answers in a row, until it is no coincidence
# An overloaded node makes each daemon slow, and to start one again ends all its clients.
_SILENT_SECONDS, _UNANSWERED = 15.0, 3  # without any answer, and questions meanwhile
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds


class ServerHealth:
    """Of one server. It is not recorded: a new agent checks the server itself."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._checked_at = float("-inf")
        self._strikes = 0
        self._asked_at: float | None = None  # when the first unanswered question was asked
        self._unanswered = 0
        self._silent = 0.0  # seconds from that one to the end of the last
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.retry_at = float("-inf")  # when the next repair is due
        self.problem = ""  # empty: it is well
        self.clients: tuple[MpsClient, ...] = ()  # when it last answered

    def needs_check(self, older_than: float = STATUS_SECONDS) -> bool:
        """Whether the last check is that old; for a server that is not well, a second is enough."""
        allowed = min(older_than, 1.0) if self.problem else older_than
        return self._clock.passed() - self._checked_at >= allowed

    @property
    def failed(self) -> bool:
        """Whether it has to be started again."""
        silent = self._silent >= _SILENT_SECONDS and self._unanswered >= _UNANSWERED
        return silent or self._strikes >= _STRIKES

    def answered(self, status: DaemonStatus) -> None:
        self.clients = status.clients
        if status.ready:
            self._checked_at = self._clock.passed()
            self._strikes, self.problem = 0, ""
            self._answered()
        else:
            self.answered_wrong(f"its state is {status.state!r}")

    def answered_wrong(self, why: str) -> None:
        """It answered with an error, or that it is not ready."""
        self._checked_at = self._clock.passed()
        self._answered()
        self._strikes += 1
        self.problem = why

    def did_not_answer(self, why: str, asked_at: float) -> None:
        self._checked_at = self._clock.passed()
        if self._asked_at is None:
            self._asked_at = asked_at
        self._unanswered += 1
        self._silent = self._checked_at - self._asked_at
        self.problem = why

    def could_not_ask(self, why: str) -> None:
        """There was no program to ask it with: that is not its fault."""
        self._checked_at = self._clock.passed()
        self.problem = f"it cannot be asked: {why}"

    @contextmanager
    def counting_timeouts(self) -> Iterator[None]:
        """Around a command to its daemon: after a timeout, it is checked again soon."""
        asked_at = self._clock.passed()
        try:
            yield
        except MpsClientStuck:
            raise
        except TimedOut as e:
            self.did_not_answer(str(e), asked_at)
            raise

    def restarted(self) -> None:
        self._strikes, self.problem = 0, ""
        self._backoff.reset()
        self._answered()
        self._checked_at, self.retry_at = self._clock.passed(), float("-inf")
        self.clients = ()

    def back_off(self, why: str) -> None:
        """A repair failed: wait longer each time."""
        self.problem = why
        self.retry_at = self._clock.passed() + self._backoff.next_seconds()

    @property
    def is_due(self) -> bool:
        return self._clock.passed() >= self.retry_at

    def _answered(self) -> None:
        self._asked_at, self._unanswered, self._silent = None, 0, 0.0
