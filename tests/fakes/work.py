"""How much work something is, in calls of functions: the same on every machine."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


def calls(act: Callable[[], object], of: Callable[..., Any] | None = None) -> int:
    """How many functions *act* calls, of Python and of C; *of*: how often that one."""
    code: CodeType | None = of.__code__ if of is not None else None
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if code is None:
            count += event in ("call", "c_call")
        else:
            count += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count
