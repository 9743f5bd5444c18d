"""Another driver of the same name beside the plugin, as its node and its administrator see it."""

import time
from collections.abc import Callable
from pathlib import Path

from dra_driver.kubeletplugin.serve.services import DraService
from tests.builders import POOL
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.claimdriver import Counted, Desk, Running
from tests.fakes.kubelet import FakeKubelet
from tests.plugin.conftest import free_port, readiness
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
THEIRS = "11111111-0000-4000-8000-000000000000"
OURS = "22222222-0000-4000-8000-000000000000"
OURS_TOO = "33333333-0000-4000-8000-000000000000"
EVENT = "OtherDriverOfThisName"


def reasons(server: ApiServer) -> list[str]:
    return [event["reason"] for event in server.objects("events")]


def test_another_driver_of_this_name_is_named_until_it_goes(
    server: ApiServer, start: Callable[..., Process], home: Path, kubelet: FakeKubelet
) -> None:
    port = free_port()
    service = DraService(Desk(), Counted())
    with Running(home / "kubelet", service, THEIRS, driver=DRIVER) as theirs:
        kubelet.wait_for_plugin(DRIVER)
        start(pod_uid=OURS, reconcile_interval="0.2", http_address=f"127.0.0.1:{port}")
        kubelet.wait_for_plugin(DRIVER, 2)
        eventually(lambda: "[-] other-drivers: another driver" in readiness(port)[1], "the page")
        status, page = readiness(port)
        assert status == 503
        assert str(theirs.paths.registration) in page
        assert "give one another driverName" in page
        assert server.wait(lambda: EVENT in reasons(server))
        (event,) = (event for event in server.objects("events") if event["reason"] == EVENT)
        assert (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == ("Node", POOL)
        assert str(theirs.paths.registration) in event["message"]

    eventually(lambda: readiness(port)[0] == 200, "it to be ready")


def test_the_other_process_of_an_update_and_other_drivers_are_no_matter(
    server: ApiServer, start: Callable[..., Process], home: Path, kubelet: FakeKubelet
) -> None:
    ports = free_port(), free_port()
    with Running(home / "kubelet", DraService(Desk(), Counted()), driver="gpu.example.com"):
        for pod_uid, port in zip((OURS, OURS_TOO), ports, strict=True):
            start(pod_uid=pod_uid, reconcile_interval="0.2", http_address=f"127.0.0.1:{port}")
            eventually(lambda port=port: readiness(port)[0] == 200, "it to be ready")  # type: ignore[misc]
        kubelet.wait_for_plugin(DRIVER, 2)
        until = time.monotonic() + 1  # some looks
        while time.monotonic() < until:
            assert [readiness(port)[0] for port in ports] == [200, 200]
    assert EVENT not in reasons(server)
