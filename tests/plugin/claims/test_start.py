"""What starts the preparing of claims: whoever looks after claims hears of every change."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dra_driver.base.errors import NodeError
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.model.driver_files import DriverFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.start import start
from tests.builders import POOL
from tests.plugin.memory.parts import plugin_parts
from tests.waiting import eventually


class Nobody:
    """All that recovering a node without claims has no question for."""

    def is_newest(self) -> bool:
        return True

    def driver_files(self) -> DriverFiles:
        raise NodeError("no driver is installed")

    def __getattr__(self, name: str) -> Any:
        return self


def started(tmp_path: Path, stack: ExitStack) -> Any:
    """The parts of a plugin, with what prepares claims."""
    settings = SimpleNamespace(
        driver_name="gpu.nvidia.com",
        node_name=POOL,
        plugin_dir=tmp_path,
        host_root=tmp_path / "host",
        pod_uid="new",
        cdi_dir=tmp_path / "cdi",
        nvidia_cdi_hook="",
        mps_socket="",
        reconcile_interval=60.0,
        look_interval=0.01,
    )
    parts = plugin_parts(Nobody(), ledger=Ledger(tmp_path / "claims", "boot"))
    parts.settings, parts.offers, parts.labels = settings, Nobody(), Nobody()  # type: ignore[assignment]
    start(parts, stack)
    return parts


def test_it_ends_also_where_nobody_can_tell_which_process_is_newest(tmp_path: Path) -> None:
    def unreadable() -> bool:
        raise NodeError("cannot read the directory of instances")

    with ExitStack() as stack:
        started(tmp_path, stack).is_newest = unreadable


def test_claims_may_be_others_after_another_process_had_the_lease(tmp_path: Path) -> None:
    heard: list[object] = []
    with ExitStack() as stack:
        parts = started(tmp_path, stack)
        parts.claim_listeners.append(heard.append)
        for _ in range(2):
            with parts.lease.held():
                assert heard == [None]  # at the first lease, whoever had it before

        with PluginLease(tmp_path, "old", lambda: None).held():
            pass
        with parts.lease.held():
            assert heard == [None, None]


def test_what_another_process_prepared_is_read_soon_while_no_claim_comes(tmp_path: Path) -> None:
    heard: list[object] = []
    with ExitStack() as stack:
        parts = started(tmp_path, stack)
        with parts.lease.held():
            pass
        parts.claim_listeners.append(heard.append)
        for act in parts.after_publishing:
            act()

        with PluginLease(tmp_path, "old", lambda: None).held():
            assert not heard

        eventually(lambda: heard == [None], "the ledger to be read")
