"""What `up` decided and found, written down before it changes anything."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hack.testbed.errors import ClusterError


@dataclass(frozen=True, slots=True)
class State:
    """The cluster in this directory. `why` is the reason for having no node, None with one."""

    version: str
    why: str | None
    boot: str
    ports: Mapping[str, int]
    feature_gates: Mapping[str, bool]
    made_directories: list[str]
    sysctls: dict[str, str]
    shares_root: bool = False  # whether `up` made the machine's / a shared mount

    @property
    def node(self) -> bool:
        return self.why is None

    def save(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(asdict(self), indent=2, sort_keys=True))
        os.replace(partial, path)


def load_state(path: Path) -> State | None:
    """The state on record, or None where there is no cluster."""
    try:
        return State(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as e:
        raise ClusterError(
            f"{path} is not a record of this program ({e}); stop what runs from {path.parent}, "
            "unmount what is mounted there, and remove it"
        ) from e
