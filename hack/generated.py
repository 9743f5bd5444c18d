"""Files that are written from the code: write them anew, or say which are stale."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def stale(files: Mapping[Path, str]) -> Mapping[Path, str]:
    """Those of *files*, text by path, that are not so on the disk."""
    return {
        path: text for path, text in files.items() if not path.exists() or path.read_text() != text
    }


def update(
    program: str, purpose: str | None, files: Mapping[Path, str], arguments: Sequence[str] | None
) -> int:
    """The command line of *program*, which writes *files*. 1: there are stale ones, printed."""
    parser = argparse.ArgumentParser(prog=program, description=purpose)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    check = parser.parse_args(arguments).check
    changes = stale(files)
    for path, text in changes.items():
        if check:
            print(f"{path.relative_to(REPOSITORY)} is stale: run {program}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if check and changes else 0
