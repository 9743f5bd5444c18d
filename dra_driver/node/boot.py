"""Which boot of the machine this is: what claims did to a node does not outlive it."""

from pathlib import Path

from dra_driver.errors import NodeError


def boot_id(host_root: Path) -> str:
    """The kernel's random boot ID (``/proc/sys/kernel/random/boot_id``, proc(5))."""
    path = host_root / "proc/sys/kernel/random/boot_id"
    try:
        return path.read_text().strip()
    except OSError as e:
        raise NodeError(
            f"{path} cannot be read: {e.strerror}; give --host-root the host's / with its /proc"
        ) from e
