"""How well a server is, as far as was seen, and when it is tried again."""

from typing import Final

from dra_driver.agent.tools import Clock
from dra_driver.model.mps import MpsClient
from dra_driver.node.mps.daemon import Look

LOOK_SECONDS: Final = 12.0  # between two looks at a server that is well: a look runs a program
_STRIKES: Final = 2  # times in a row that a look went wrong, until it is no coincidence
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # seconds


class Health:
    """Of one server. Nothing of it is written down: a new agent looks for itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_at = float("-inf")
        self._strikes = 0
        self._pause = 0.0
        self.again_at = float("-inf")  # when the next try to mend it is due
        self.trouble = ""  # empty: it is well
        self.clients: tuple[MpsClient, ...] = ()  # when it last answered

    def needs_look(self, older_than: float = LOOK_SECONDS) -> bool:
        """Whether nobody looked for so long; at a server that is not well, whether nobody did just
        now."""
        allowed = min(older_than, 1.0) if self._strikes else older_than
        return self._clock.passed() - self._looked_at >= allowed

    @property
    def failed(self) -> bool:
        """Whether it has to be started again."""
        return self._strikes >= _STRIKES

    def saw(self, look: Look) -> None:
        """It answered."""
        self._looked_at = self._clock.passed()
        self.clients = look.clients
        if look.ready:
            self._strikes, self.trouble = 0, ""
        else:
            self._strike(f"its state is {look.state!r}")

    def saw_nothing(self, why: str) -> None:
        """It gave no answer, or an error."""
        self._looked_at = self._clock.passed()
        self._strike(why)

    def fresh(self) -> None:
        """It was just started."""
        self._strikes, self._pause, self.trouble = 0, 0.0, ""
        self._looked_at, self.again_at = self._clock.passed(), float("-inf")
        self.clients = ()

    def pause(self, why: str) -> None:
        """What should mend it failed: wait longer each time."""
        self.trouble = why
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self.again_at = self._clock.passed() + self._pause

    @property
    def is_due(self) -> bool:
        return self._clock.passed() >= self.again_at

    def _strike(self, why: str) -> None:
        self._strikes += 1
        self.trouble = why
