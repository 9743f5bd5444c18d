"""The file that a daemon of protocol 3 is started with: TOML, read once."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from dra_driver.model.mps import Allowance, Priority, Space
from dra_driver.node.mps.daemon import SERVER, Daemon
from dra_driver.node.mps.tables import size_text

_BARE: Final = re.compile("[a-z0-9_]+")
DEFAULT: Final = "default"  # the namespace that a server has by itself
# Nobody is meant to be in there. It cannot be taken away, so it gets as little as there is.
_DEFAULT_ALLOWANCE: Final = Allowance(percent=1)


def config_text(daemon: Daemon, spaces: Sequence[Space]) -> str:
    """One server over the daemon's GPUs, and a namespace for each of *spaces*."""
    lines = [
        'schema_version = "1.0"',
        "",
        f"[servers.{SERVER}]",
        f"allowed_devices = {_string(','.join(daemon.gpus))}",
        *_namespace(DEFAULT, _DEFAULT_ALLOWANCE, Priority.NORMAL),
    ]
    for space in sorted(spaces, key=lambda space: space.name):
        lines += _namespace(space.name, space.allowance, space.priority)
    # Clients that share a context are not told apart where their memory is counted.
    lines += ["", "[features.context-share]", "enabled = false"]
    return "\n".join(lines) + "\n"


def _namespace(name: str, allowance: Allowance, priority: Priority) -> Iterator[str]:
    yield ""
    yield f"[servers.{SERVER}.namespaces.{name if _BARE.fullmatch(name) else _string(name)}]"
    yield f"active_thread_percentage = {_string(str(allowance.percent))}"
    if allowance.memory_bytes is not None:
        yield f"pinned_memory_limit = {_string(size_text(allowance.memory_bytes))}"
    yield f"client_priority = {_string(str(int(priority)))}"


def _string(text: str) -> str:
    """A basic string of TOML, which escapes what JSON does, and the character DEL too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
