"""Starts what watches the health of the GPUs: NVML's events, looks, and who is told of it."""

import time
from contextlib import ExitStack
from functools import partial
from typing import Final

from dra_driver.base.threads import Loop
from dra_driver.k8s.events import NodeRef
from dra_driver.node.cgroups.processes import ContainerProcesses
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.health_file import HealthFile
from dra_driver.plugin.health.clear_requests import ClearAnnotation
from dra_driver.plugin.health.monitor import HealthInputs, HealthMonitor
from dra_driver.plugin.health.report import HealthReporter
from dra_driver.plugin.metrics import HealthMetrics
from dra_driver.plugin.parts import PluginParts

_LOOKS: Final = 3  # one look at the health of GPUs for so many reads of the GPUs


def start(parts: PluginParts, stack: ExitStack) -> None:
    """Events are waited for from the first scan on, and taken up once the GPUs were published."""
    settings, labels, node = parts.settings, parts.labels, parts.node
    reporter = HealthReporter(
        parts.events,
        HealthMetrics(parts.metrics),
        lambda: NodeRef(labels.node, labels.uid),
        parts.ledger.records,
        ContainerProcesses().find,
    )
    requests = ClearAnnotation(parts.api, labels.node, labels.annotations, time.monotonic)
    inputs = HealthInputs(
        scan=node.refresh,
        readings=node.health_readings,
        unmonitored=lambda: node.events.unmonitored,
        profile=parts.profile.current,
        is_newest=parts.is_newest,
        look_seconds=_LOOKS * settings.look_interval,
    )
    file = HealthFile(settings.health_state, boot_id(settings.host_root))
    monitor = parts.health = HealthMonitor(inputs, file, reporter, requests)
    loop = Loop("health", monitor.step, inputs.look_seconds)
    monitor.wake = loop.soon
    monitor.on_change += [parts.scan_soon, parts.health_changed]

    def node_changed() -> None:
        requests.seen()
        loop.soon()

    labels.start(node_changed, 0.0)
    parts.before_publishing.append(partial(node.events.start, monitor.saw))
    parts.after_publishing.append(loop.start)
    stack.callback(loop.stop)
    stack.callback(node.events.stop)
