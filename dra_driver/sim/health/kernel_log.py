"""The kernel log of a simulated host, in which NVIDIA's driver names the process of an Xid.

It is a plain file to which lines are added, each in the form in which /dev/kmsg gives a record.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pydantic

from dra_driver.sim.documents import Document
from dra_driver.sim.health.spec import SimulatedEvent, events_after
from dra_driver.sim.host.tools import SETTINGS_DIRECTORY
from dra_driver.sim.mig.state import put_file
from dra_driver.sim.node_spec import SimulatedGpu, SimulatedNode

KERNEL_LOG: Final = "dev/kmsg"
_LOGGED: Final = f"{SETTINGS_DIRECTORY}/kernel-log.json"
_PREFIX: Final = 4  # facility kern, level warning


class _Logged(Document):
    """What is in the log."""

    lines: int = pydantic.Field(default=0, ge=0)
    events: Mapping[str, tuple[SimulatedEvent, ...]] = {}  # by UUID


def write_kernel_log(host: Path, node: SimulatedNode) -> None:
    """Add the Xids that *node* has besides those that were written. Several processes may do it at
    the same time: each Xid is written once."""
    file = os.open(host / KERNEL_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = _read(host)
        now = {str(gpu.uuid): gpu.events for gpu in node.gpus if gpu.events}
        if now == before.events:
            return
        messages = [
            message
            for gpu in node.gpus
            for event in events_after(before.events.get(str(gpu.uuid), ()), gpu.events)
            for message in _messages(gpu, event)
        ]
        microseconds = int(time.monotonic() * 1e6)
        text = "".join(
            f"{_PREFIX},{before.lines + place},{microseconds},-;{message}\n"
            for place, message in enumerate(messages)
        )
        os.write(file, text.encode())
        logged = _Logged(lines=before.lines + len(messages), events=now)
        put_file(host / _LOGGED, logged.model_dump_json())
    finally:
        os.close(file)


def _read(host: Path) -> _Logged:
    try:
        return _Logged.model_validate_json((host / _LOGGED).read_bytes())
    except FileNotFoundError:
        return _Logged()


def _messages(gpu: SimulatedGpu, event: SimulatedEvent) -> Iterator[str]:
    """As the open kernel module words them (kernel_rc.c, driver 595)."""
    if event.xid is None:
        return
    place = f"PCI:{gpu.bus_id.rpartition('.')[0]}"
    if event.gi is not None:
        place += f" GPU-I:{event.gi:02}"
    if event.ci is not None:
        place += f" GPU-CI:{event.ci:02}"
    process = f"pid={event.pid}, name={event.name}, " if event.pid is not None else ""
    for _ in range(event.times):
        yield f"NVRM: Xid ({place}): {event.xid}, {process}simulated"
