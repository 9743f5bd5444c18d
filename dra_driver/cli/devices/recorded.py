"""What the plugin of this node has on record, or nothing and a warning."""

import logging

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import Gpu
from dra_driver.model.health import HealthState
from dra_driver.model.mig_layouts import MigState
from dra_driver.model.records import HoldingsByGpu, holdings_by_gpu
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.known_gpus import KnownGpusFile
from dra_driver.node.state.ledger_files import read_ledger_directory
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.settings import ClaimsSettings, DevicesSettings

log = logging.getLogger(__name__)


def recorded_holdings(settings: DevicesSettings) -> HoldingsByGpu:
    """What claims hold."""
    try:
        records, _ = read_ledger_directory(settings.ledger_dir / boot_id(settings.host_root))
    except NodeError as e:
        log.warning("every GPU counts as free: %s", e)
        return {}
    return holdings_by_gpu(records.values())


def recorded_mig_state(settings: DevicesSettings) -> MigState:
    """What layouts made of GPUs."""
    try:
        return MigStateFile(settings.mig_state, boot_id(settings.host_root)).read()
    except NodeError as e:
        log.warning("what layouts made counts as somebody else's: %s", e)
        return MigState()


def recorded_health(settings: DevicesSettings) -> HealthState:
    """What the plugin found to be wrong with GPUs."""
    try:
        return HealthFile(settings.health_state, boot_id(settings.host_root)).inspect()
    except NodeError as e:
        log.warning("every GPU counts as healthy: %s", e)
        return HealthState()


def recorded_gpus(settings: ClaimsSettings) -> tuple[Gpu, ...]:
    """The GPUs as they were when they last answered the plugin."""
    return KnownGpusFile(settings.known_gpus, boot_id(settings.host_root)).read()
