"""How well a server is, as far as was seen, and when it is tried again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dra_driver.agent.dependencies import AgentClock
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import MpsClientStuck, TimedOut
from dra_driver.model.mps import MpsClient
from dra_driver.node.mps.daemon import DaemonStatus

STATUS_SECONDS: Final = 12.0  # between two looks at a server that is well: a look runs a program
_STRIKES: Final = 2  # wrong answers in a row, until it is no coincidence
# A node on which nobody gets on makes a daemon slow, and to start it again ends all its clients.
_SILENT_SECONDS, _UNANSWERED = 15.0, 3  # without any answer, and questions meanwhile
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds


class ServerHealth:
    """Of one server. Nothing of it is written down: a new agent looks for itself."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._looked_at = float("-inf")
        self._strikes = 0
        self._asked_at: float | None = None  # first of those that were not answered
        self._unanswered = 0
        self._silent = 0.0  # seconds, when the last one was given up
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self.again_at = float("-inf")  # when the next try to mend it is due
        self.trouble = ""  # empty: it is well
        self.clients: tuple[MpsClient, ...] = ()  # when it last answered

    def needs_look(self, older_than: float = STATUS_SECONDS) -> bool:
        """Whether nobody looked for so long; at a server that is not well, whether nobody did just
        now."""
        allowed = min(older_than, 1.0) if self.trouble else older_than
        return self._clock.passed() - self._looked_at >= allowed

    @property
    def failed(self) -> bool:
        """Whether it has to be started again."""
        silent = self._silent >= _SILENT_SECONDS and self._unanswered >= _UNANSWERED
        return silent or self._strikes >= _STRIKES

    def saw(self, look: DaemonStatus) -> None:
        """It answered."""
        self.clients = look.clients
        if look.ready:
            self._looked_at = self._clock.passed()
            self._strikes, self.trouble = 0, ""
            self._answered()
        else:
            self.saw_wrong(f"its state is {look.state!r}")

    def saw_wrong(self, why: str) -> None:
        """It answered, and not as it should."""
        self._looked_at = self._clock.passed()
        self._answered()
        self._strikes += 1
        self.trouble = why

    def saw_nothing(self, why: str, asked_at: float) -> None:
        """It did not answer."""
        self._looked_at = self._clock.passed()
        if self._asked_at is None:
            self._asked_at = asked_at
        self._unanswered += 1
        self._silent = self._looked_at - self._asked_at
        self.trouble = why

    def could_not_ask(self, why: str) -> None:
        """Which is not its fault."""
        self._looked_at = self._clock.passed()
        self.trouble = f"it cannot be asked: {why}"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A daemon that does not answer is looked at again soon."""
        asked_at = self._clock.passed()
        try:
            yield
        except MpsClientStuck:
            raise
        except TimedOut as e:
            self.saw_nothing(str(e), asked_at)
            raise

    def fresh(self) -> None:
        """It was just started."""
        self._strikes, self.trouble = 0, ""
        self._backoff.reset()
        self._answered()
        self._looked_at, self.again_at = self._clock.passed(), float("-inf")
        self.clients = ()

    def pause(self, why: str) -> None:
        """What should mend it failed: wait longer each time."""
        self.trouble = why
        self.again_at = self._clock.passed() + self._backoff.next_seconds()

    @property
    def is_due(self) -> bool:
        return self._clock.passed() >= self.again_at

    def _answered(self) -> None:
        self._asked_at, self._unanswered, self._silent = None, 0, 0.0
