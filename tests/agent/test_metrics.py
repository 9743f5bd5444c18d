"""What the agent counts."""

from prometheus_client import generate_latest

from dra_driver.agent.metrics import metrics_registry
from dra_driver.model.mps import MpsClient, MpsServer, MpsServerName, MpsServerRestart, MpsStatus

SERVER = MpsServer(MpsServerName("s1"), (), 3, ready=True, clients=(MpsClient(1), MpsClient(2)))


def exported(status):
    lines = generate_latest(metrics_registry(lambda: status, lambda: 3)).decode().splitlines()
    return {line for line in lines if line.startswith("dra_driver_mps")}


def test_it_counts_what_there_is():
    down = MpsServer(MpsServerName("s2"), (), 3, ready=False)
    status = MpsStatus(
        (SERVER, down), (MpsServerRestart(7, MpsServerName("s2"), 0.0, ""),), ("other",)
    )

    assert exported(status) == {
        'dra_driver_mps_servers{ready="true"} 1.0',
        'dra_driver_mps_servers{ready="false"} 1.0',
        "dra_driver_mps_clients 2.0",
        "dra_driver_mps_restarts_total 7.0",
        "dra_driver_mps_unmanaged_daemons 1.0",
        "dra_driver_mps_servers_in_agent_container 3.0",
    }


def test_no_restart_is_a_number_too():
    assert "dra_driver_mps_restarts_total 0.0" in exported(MpsStatus())
