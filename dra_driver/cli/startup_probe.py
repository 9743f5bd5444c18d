"""``dra-driver startup-probe``: whether the plugin of this pod has started.

The chart's startup probe on the host's network, where another pod's plugin may have the HTTP port.
It runs seldom, and imports little.
"""

from dra_driver.kubeletplugin.serve.rolling_update import plugin_processes
from dra_driver.settings import StartupProbeSettings


def startup_problem(settings: StartupProbeSettings) -> str:
    """Why the plugin of this pod has not started; empty: it has."""
    for process in plugin_processes(settings.instances_dir):
        if process.pod_uid == settings.pod_uid:
            return "" if process.started else "it is not ready yet: its log says why"
    return "its process has not come so far yet"
