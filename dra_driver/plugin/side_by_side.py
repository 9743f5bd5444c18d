"""Things done for several GPUs at once: each may take seconds, and a call has few of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 8


def side_by_side(act: Callable[[T], R], things: Sequence[T]) -> list[R]:
    """What *act* answers for each of *things*, in their order; all are begun, whatever fails.

    Raises what the first of them raised that failed, once all have ended.
    """
    if len(things) < 2:
        return [act(thing) for thing in things]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = [threads.submit(act, thing) for thing in things]
    return [answer.result() for answer in answers]
