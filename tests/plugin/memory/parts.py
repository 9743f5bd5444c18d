"""The parts that a test starts memory with: one fake for each that the test does not name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dra_driver.plugin.parts import PluginParts
from tests.builders import POOL


def plugin_parts(fake: Any, guard_seconds: float = 60.0, **named: Any) -> PluginParts:
    settings: Any = SimpleNamespace(
        driver_name="gpu.nvidia.com",
        node_name=POOL,
        guard_interval=guard_seconds,
        kubelet_dir=Path("/nonexistent"),
        device_plugin_dir=Path("/nonexistent"),
    )
    defaults = dict.fromkeys(("api", "node", "ledger", "metrics", "events", "in_use"), fake)
    parts = PluginParts(
        settings=settings,
        is_newest=fake.is_newest,
        note_started=lambda: None,
        **defaults | named,
    )
    parts.claims = parts.pods = parts.prepared_claims = fake
    return parts
