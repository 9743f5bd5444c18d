"""This source as the next release could be: the same, but for the formats that it writes."""

import shutil
from pathlib import Path
from typing import Final

from dra_driver.base.codec import RELEASE

ROOT: Final = Path(__file__).parents[1]
NEXT_RELEASE: Final = "99.0.0"
# By module: what stands there, and what the next release has instead.
_CHANGES: Final = {
    "base/codec.py": (f'RELEASE: Final = "{RELEASE}"', f'RELEASE: Final = "{NEXT_RELEASE}"'),
    "model/records.py": (
        '    pod_claim_name: str = ""  #',
        '    colours: tuple[str, ...] = ("green",)\n    pod_claim_name: str = ""  #',
    ),
    "model/mps.py": (
        '    shm_directory: str = ""  #',
        '    colour: str = "green"\n    shm_directory: str = ""  #',
    ),
    "model/mig_layouts.py": (
        "    labelled: bool = False  #",
        '    colour: str = "green"\n    labelled: bool = False  #',
    ),
    "agent/state.py": (
        "    restarts: int = 0\n",
        '    restarts: int = 0\n    colour: str = "green"\n',
    ),
}


def write_next_release(directory: Path) -> Path:
    """Make *directory* the source of that release: a claim, a layout, a server of MPS and what is
    served of it have a field more, also in what the plugin and the MPS agent say to each other."""
    for package in ("api", "cdi", "dra_driver"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, directory / package, ignore=ignored)
    for module, (before, after) in _CHANGES.items():
        path = directory / "dra_driver" / module
        source = path.read_text()
        if source.count(before) != 1:
            raise AssertionError(f"{module} does not have {before!r} once")
        path.write_text(source.replace(before, after))
    return directory
