"""Whether directories of the host are still those that this process sees.

A container goes on seeing a directory that was removed on the host and made anew: what it writes
there, nobody reads.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def removed(directories: Iterable[Path]) -> str | None:
    """Which of them was removed while this process sees it; None: none of them. One that is not
    there is not made yet."""
    for directory in directories:
        try:
            links = os.stat(directory).st_nlink
        except FileNotFoundError:
            continue
        except OSError as e:
            return f"{directory} cannot be looked at: {e.strerror}"
        if links == 0:
            return (
                f"{directory} was removed on the host, and this process sees the removed one: it "
                "has to be started again"
            )
    return None
