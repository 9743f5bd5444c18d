"""Which requests are tried again, when, and how often."""

from collections.abc import Callable

import tenacity

from dra_driver.errors import Unreachable

_TRIES = 3


class AskedToWait(Unreachable):
    """An answer that says how long to wait."""

    def __init__(self, message: str, status: int, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.is_turned_away = status in (429, 503)  # nothing was done; of a 504 that is not known


def is_unreachable(error: BaseException) -> bool:
    """What a read is tried again after."""
    return isinstance(error, Unreachable)


def is_turned_away(error: BaseException) -> bool:
    """What anything may be tried again after: nothing was done, and it was said when to come."""
    return isinstance(error, AskedToWait) and error.is_turned_away


def attempts(
    again: Callable[[BaseException], bool],
    seconds: float,
    longest_wait: float,
    sleep: Callable[[float], None],
) -> tenacity.Retrying:
    """A few tries that begin within *seconds*, of which the last one's error counts.

    *longest_wait*: before the second try, then twice that; a wait that the API server asked for is
    as long as it said.
    """

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(again),
        stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_before_delay(seconds),
        wait=_AsAsked(longest_wait),
        sleep=sleep,
        reraise=True,
    )


class _AsAsked(tenacity.wait_random_exponential):
    """Ever longer waits, except where the API server said how long to wait."""

    def __call__(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return error.seconds if isinstance(error, AskedToWait) else super().__call__(state)
