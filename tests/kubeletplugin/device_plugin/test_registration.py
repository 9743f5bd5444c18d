"""When a resource is registered with the kubelet, when again, and when not."""

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dra_driver.kubeletplugin.device_plugin.server import DevicePluginServer
from tests.fakes.device_manager import AdmissionError, FakeDeviceManager
from tests.fakes.device_plugins import GPU, SHARED, DeviceGate, FakeHandler, fail, resource, serving
from tests.kubeletplugin.device_plugin.steps import names, quiet, registered, started
from tests.waiting import eventually


@pytest.mark.point(111, 112, 113, 123)
def test_a_resource_is_served_and_then_registered(short: Path, kubelet: FakeDeviceManager) -> None:
    """The fake dials and asks for the options before it answers Register, as the kubelet does."""
    with serving(short, resource("a", "b"), instance="pod-uid") as server:
        registered(kubelet, server, 2)
        kubelet.pre_start(kubelet.allocate(GPU, 1))

    (registration,) = kubelet.registrations
    assert (registration.resource, registration.version) == ("nvidia.com/gpu", "v1beta1")
    assert registration.endpoint == "dra-nvidia.com_gpu-pod-uid.sock"
    assert registration.error == ""


def test_every_resource_is_registered_and_has_its_own_socket(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a"), resource("a::0", "a::1", name=SHARED)) as server:
        registered(kubelet, server)
        kubelet.wait_for_allocatable(SHARED, 2)

    assert len({each.endpoint for each in kubelet.registrations}) == 2


@pytest.mark.point(132)
def test_without_a_resource_nothing_is_served(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short) as server:
        quiet(kubelet)

        assert server.problem() is None
        assert names(short) == ["kubelet.sock"]


@pytest.mark.point(132)
def test_a_resource_without_devices_is_listed_as_empty(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource()) as server:
        registered(kubelet, server, 0)

        assert kubelet.capacity(GPU) == 0


@pytest.mark.point(114)
def test_a_refused_registration_is_tried_again(short: Path, kubelet: FakeDeviceManager) -> None:
    kubelet.refusals = ["not now"] * 4
    with serving(short, resource("a")) as server:
        eventually(lambda: "not now" in (server.problem() or ""), "the refusal to be told")
        registered(kubelet, server)

    times = [each.at for each in kubelet.registrations]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(waits) == 4
    assert waits == sorted(waits), "each wait is longer than the one before"


@pytest.mark.point(115)
def test_where_no_kubelet_is_it_waits(short: Path) -> None:
    directory = short / "device-plugins"
    with serving(directory, resource("a")) as server:
        eventually(lambda: "there is no" in (server.problem() or ""), "the problem to be told")
        assert str(directory / "kubelet.sock") in (server.problem() or "")
        time.sleep(1.0)
        with FakeDeviceManager(directory) as kubelet:
            started = time.monotonic()
            registered(kubelet, server)

            assert kubelet.registrations[-1].at - started < 2.0
            assert len(kubelet.registrations) == 1


@pytest.mark.point(116)
def test_a_stream_that_ended_is_registered_again(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        kubelet.disconnect(GPU)
        kubelet.wait_until(lambda: len(kubelet.registrations) == 2, "another Register")
        registered(kubelet, server)

        quiet(kubelet)
        assert [each.streams for each in kubelet.registrations] == [0, 0]


@pytest.mark.point(119)
def test_a_stream_of_somebody_else_that_ends_costs_one_registration(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    """A second stream of the kubelet would close the first one's connection when it ends."""
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        second = kubelet.connect_again(GPU)
        kubelet.wait_until(lambda: len(kubelet.lists) == 2, "the list of the second one")
        second.close()
        kubelet.wait_until(lambda: len(kubelet.registrations) == 2, "another Register")
        registered(kubelet, server)

        quiet(kubelet)
        assert [each.streams for each in kubelet.registrations] == [0, 0]
        assert kubelet.streams(GPU) == 1


@pytest.mark.point(117, 119)
def test_a_deleted_socket_comes_back_and_a_live_stream_is_left_alone(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        sockets = names(short)
        for path in sockets:
            if path != "kubelet.sock":
                (short / path).unlink()
        eventually(lambda: names(short) == sockets, "the sockets to come back")
        quiet(kubelet)
        server.offer([resource("a", "b")])
        registered(kubelet, server, 2)
        kubelet.allocate(GPU, 2)

        assert len(kubelet.registrations) == 1

        kubelet.disconnect(GPU)
        kubelet.wait_until(lambda: len(kubelet.registrations) == 2, "another Register")
        registered(kubelet, server, 2)


def test_sockets_that_are_deleted_again_and_again_come_back_and_calls_go_on(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a", "b", "c")) as server:
        registered(kubelet, server, 3)
        sockets = names(short)
        for _ in range(3):
            for path in sockets:
                if path != "kubelet.sock":
                    (short / path).unlink()
            eventually(lambda: names(short) == sockets, "the sockets to come back")
            kubelet.allocate(GPU, 1)

        assert len(kubelet.registrations) == 1


@pytest.mark.point(117, 118)
@pytest.mark.parametrize("minor", [26, 30, 36])
def test_a_restarted_kubelet_is_registered_with_within_two_seconds(short: Path, minor: int) -> None:
    with FakeDeviceManager(short, minor) as kubelet:
        with serving(short, resource("a"), resource("s", name=SHARED)) as server:
            for _ in range(5):
                registered(kubelet, server)
                kubelet.wait_for_allocatable(SHARED, 1)
                kubelet.kill()
                kubelet.start()
                started = time.monotonic()
                registered(kubelet, server)
                kubelet.wait_for_allocatable(SHARED, 1)

                assert time.monotonic() - started < 2.0
        assert all(each.streams == 0 for each in kubelet.registrations)


@pytest.mark.point(118)
def test_a_kubelet_that_was_away_for_long_is_registered_with_within_two_seconds(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        kubelet.kill()
        eventually(lambda: server.problem() is not None, "the kubelet's end to be seen")
        time.sleep(4.0)
        kubelet.start()
        started = time.monotonic()
        registered(kubelet, server)

        assert time.monotonic() - started < 2.0


def test_a_socket_of_a_kubelet_that_does_not_answer_is_asked_ever_more_seldom(
    short: Path, kubelet: FakeDeviceManager, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        kubelet.kill()
        eventually(lambda: "did not register" in (server.problem() or ""), "a refused attempt")
        time.sleep(3.0)

    attempts = [each for each in caplog.records if "did not register" in str(vars(each))]
    assert 1 <= len(attempts) <= 6


def test_a_kubelet_that_registers_and_never_asks_for_the_list_is_asked_again(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    kubelet.deaf = True
    with serving(short, resource("a"), stream_seconds=1.0) as server:
        kubelet.wait_until(lambda: len(kubelet.registrations) == 1, "a Register")
        eventually(lambda: "not asked" in (server.problem() or ""), "the problem to be told")
        kubelet.deaf = False
        registered(kubelet, server)


@pytest.mark.point(120, 122)
def test_a_stopped_server_leaves_no_socket(short: Path, kubelet: FakeDeviceManager) -> None:
    with serving(short, resource("a"), resource("s", name=SHARED), instance="one") as server:
        registered(kubelet, server)
        kubelet.wait_for_allocatable(SHARED, 1)
        assert names(short) == [
            "dra-nvidia.com_gpu-one.sock",
            "dra-nvidia.com_gpu.shared-one.sock",
            "dra-nvidia.com_gpu.shared.sock",
            "dra-nvidia.com_gpu.sock",
            "kubelet.sock",
        ]
    assert names(short) == ["kubelet.sock"]
    assert kubelet.allocatable(GPU) == 0


@pytest.mark.point(122)
def test_sigterm_removes_the_sockets_and_ends_the_process(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with started(short, "pod-b") as process:
        kubelet.wait_for_allocatable(GPU, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    assert names(short) == ["kubelet.sock"]
    kubelet.wait_for_allocatable(GPU, 0)


@pytest.mark.point(121)
def test_sockets_that_a_killed_process_left_are_removed(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    (short / "nvidia-gpu.sock").touch()
    with started(short, "pod-b") as process:
        kubelet.wait_for_allocatable(GPU, 1)
        process.kill()
        process.wait(30)
        kubelet.wait_for_allocatable(GPU, 0)
        assert "dra-nvidia.com_gpu-pod-b.sock" in names(short)
        with serving(short, resource("s", name=SHARED), instance="pod-c") as server:
            kubelet.wait_for_allocatable(SHARED, 1)
            eventually(lambda: server.problem() is None)
            assert names(short) == [
                "dra-nvidia.com_gpu.shared-pod-c.sock",
                "dra-nvidia.com_gpu.shared.sock",
                "kubelet.sock",
            ]
    assert (short / "nvidia-gpu.sock").exists()


def test_a_resource_that_is_left_out_is_empty_and_then_gone(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    resources = [resource("a"), resource("s", name=SHARED)]
    with serving(short, *resources, leaving_seconds=4.0) as server:
        registered(kubelet, server)
        kubelet.wait_for_allocatable(SHARED, 1)
        server.offer(resources[:1])
        kubelet.wait_for_allocatable(SHARED, 0)
        assert kubelet.capacity(SHARED) == 1, "its device does not leave at once"
        kubelet.wait_until(lambda: kubelet.capacity(SHARED) == 0, "an empty list")
        kubelet.wait_until(lambda: kubelet.streams(SHARED) == 0, "its end")
        remaining = ["dra-nvidia.com_gpu-pod-a.sock", "dra-nvidia.com_gpu.sock", "kubelet.sock"]
        eventually(lambda: names(short) == remaining, "its sockets to go")

        assert (server.problem(), kubelet.allocatable(GPU)) == (None, 1)
        assert len(kubelet.registrations) == 3, "two, and that nothing needs to be prepared"

        server.offer(resources)
        kubelet.wait_for_allocatable(SHARED, 1)


def test_pods_get_by_dra_what_is_listed_no_longer_and_devices_never_before_pre_start_is_required(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a"), leaving_seconds=0.5) as server:
        registered(kubelet, server)
        with pytest.raises(AdmissionError, match="no devices found allocated in local cache"):
            kubelet.start_by_dra(GPU)

        server.offer([resource()])
        eventually(lambda: len(kubelet.registrations) == 2, "it is registered anew")
        eventually(lambda: server.problem() is None)
        kubelet.start_by_dra(GPU)

        server.offer([resource("a")])
        registered(kubelet, server)
        kubelet.pre_start(kubelet.allocate(GPU, 1))
        with pytest.raises(AdmissionError):
            kubelet.start_by_dra(GPU)


def test_pods_get_by_dra_what_a_killed_process_listed(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a")) as killed:
        registered(kubelet, killed)
    with pytest.raises(AdmissionError):
        kubelet.start_by_dra(GPU)

    with serving(short, instance="pod-b") as server:
        assert server.has_ended
        server.end([GPU])
        eventually(lambda: server.has_ended, "the kubelet has forgotten it")

        kubelet.start_by_dra(GPU)
        assert names(short) == ["kubelet.sock"]
        assert server.problem() is None


def test_a_kubelet_that_was_started_again_has_nothing_to_forget(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a"), leaving_seconds=0.5) as server:
        registered(kubelet, server)
        kubelet.kill()
        kubelet.socket.unlink()
        server.end([])
        eventually(lambda: server.has_ended, "nobody is there to forget it")

        kubelet.start()
        quiet(kubelet)
    assert len(kubelet.registrations) == 1


def test_a_resource_that_comes_back_at_once_was_never_gone(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        server.offer([])
        kubelet.wait_for_allocatable(GPU, 0)
        server.offer([resource("a")])
        registered(kubelet, server)

        assert len(kubelet.registrations) == 1


def test_a_directory_that_is_made_anew_is_served_again(short: Path) -> None:
    directory = short / "device-plugins"
    with serving(directory, resource("a")) as server:
        with FakeDeviceManager(directory) as kubelet:
            registered(kubelet, server)
        directory.rename(short / "away")
        with FakeDeviceManager(directory) as kubelet:
            registered(kubelet, server)


def test_a_path_that_is_too_long_is_told(short: Path) -> None:
    directory = short / ("long" * 30)
    with serving(directory, resource("a")) as server:
        eventually(lambda: "use a shorter kubelet directory" in (server.problem() or ""))


def test_a_directory_that_cannot_be_made_is_told_and_tried_again(short: Path) -> None:
    (short / "file").touch()
    directory = short / "file" / "device-plugins"
    with serving(directory, resource("a")) as server:
        eventually(lambda: "cannot make the directory" in (server.problem() or ""))
        (short / "file").unlink()
        with FakeDeviceManager(directory) as kubelet:
            registered(kubelet, server)


def test_an_offer_before_the_start_is_served_by_it(short: Path, kubelet: FakeDeviceManager) -> None:
    server = DevicePluginServer(short, "one", FakeHandler(), fail)
    server.offer([resource("a")])
    assert server.problem() == "nvidia.com/gpu is not served yet"
    server.start()
    registered(kubelet, server)
    server.stop()


def test_a_call_that_hangs_does_not_keep_the_process(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    gate = DeviceGate()
    with ThreadPoolExecutor(1) as pods:
        with serving(short, resource("a"), handler=FakeHandler(on_allocate=gate)) as server:
            registered(kubelet, server)
            pod = pods.submit(kubelet.allocate, GPU, 1)
            assert gate.begun.wait(60)
            begun = time.monotonic()
            server.stop()
            assert time.monotonic() - begun < 4.5
        assert isinstance(pod.exception(60), AdmissionError)
        gate.go.set()


def test_a_kubelet_that_reads_no_list_does_not_keep_the_process(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    ids = [f"{number:046}" for number in range(40_000)]  # more than what waits in the kernel
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
        path = short / kubelet.registrations[0].endpoint
        with grpc.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")
            stream = call(b"")
            next(stream)
            server.offer([resource(*ids)])
            kubelet.wait_for_allocatable(GPU, len(ids))
            begun = time.monotonic()
            server.stop()
            assert time.monotonic() - begun < 4.5
            stream.cancel()
    assert names(short) == ["kubelet.sock"]


def test_an_ended_server_has_no_endpoint_for_new_pods(
    short: Path, kubelet: FakeDeviceManager
) -> None:
    with serving(short, resource("a")) as server:
        registered(kubelet, server)
    with pytest.raises(AdmissionError, match="has been stopped"):
        kubelet.allocate(GPU, 1)
