"""The fake kubelet refuses what the kubelet refuses."""

from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from api.kubelet import dra_v1_pb2
from api.kubelet import registration_v1_pb2 as registration
from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import ClaimRef, PreparedDevice
from tests.fakes.claimdriver import DRIVER, Desk, device, ref, running
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.plugins import KubeletError

SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"


@contextmanager
def odd_plugin(
    kubelet: FakeKubelet, answer: Sequence[str] = (), notify_fails: bool = False, **info: Any
) -> Iterator[None]:
    """A plugin that says *info* and answers prepare for these UIDs, whatever was asked."""
    path = kubelet.registry / "odd-reg.sock"
    fields = {"type": "DRAPlugin", "name": DRIVER, "supported_versions": ["v1.DRAPlugin"]} | info

    def get_info(request: Any, context: grpc.ServicerContext) -> registration.PluginInfo:
        return registration.PluginInfo(**fields)

    def notify(request: Any, context: grpc.ServicerContext) -> Any:
        if notify_fails:
            context.abort(grpc.StatusCode.INTERNAL, "cannot hear you")
        return registration.RegistrationStatusResponse()

    def prepare(request: Any, context: grpc.ServicerContext) -> Any:
        response = dra_v1_pb2.NodePrepareResourcesResponse()
        for uid in answer:
            response.claims[uid].SetInParent()
        return response

    def method(behaviour: Any, request: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "pluginregistration.Registration",
                {
                    "GetInfo": method(get_info, registration.InfoRequest),
                    "NotifyRegistrationStatus": method(notify, registration.RegistrationStatus),
                },
            ),
            grpc.method_handlers_generic_handler(
                SERVICE,
                {"NodePrepareResources": method(prepare, dra_v1_pb2.NodePrepareResourcesRequest)},
            ),
        )
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.fixture
def kubelet(short: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(short) as kubelet:
        yield kubelet


@pytest.mark.parametrize(
    ("info", "refusal"),
    [
        pytest.param({"type": "CSIPlugin"}, "no handler registered", id="another type"),
        pytest.param({"name": "Not_A_Name"}, "is not a driver name", id="a name that is none"),
        pytest.param({"supported_versions": []}, "none in common", id="no versions"),
        pytest.param({"supported_versions": ["v9.DRAPlugin"]}, "none in common", id="unknown"),
        pytest.param({"notify_fails": True}, "cannot hear you", id="a deaf plugin"),
    ],
)
def test_a_plugin_is_not_registered_with(
    kubelet: FakeKubelet, info: dict[str, Any], refusal: str
) -> None:
    with odd_plugin(kubelet, **info):
        kubelet.wait_until(lambda: any(refusal in r for r in kubelet.refusals), refusal)
        assert kubelet.instances(DRIVER) == ()


def test_the_plugins_order_of_versions_decides(kubelet: FakeKubelet) -> None:
    with odd_plugin(kubelet, supported_versions=["v1beta1.DRAPlugin", "v1.DRAPlugin"]):
        assert kubelet.wait_for_plugin(DRIVER).version == "v1beta1.DRAPlugin"


def test_an_endpoint_is_registered_once(short: Path, kubelet: FakeKubelet) -> None:
    with running(short) as run:
        kubelet.wait_for_plugin(DRIVER)
        with odd_plugin(kubelet, endpoint=str(run.paths.service)):
            kubelet.wait_until(
                lambda: any("already registered" in r for r in kubelet.refusals), "a refusal"
            )


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        pytest.param(["uid-a", "uid-x"], "unknown claim UID uid-x", id="a claim nobody asked for"),
        pytest.param([], "skipped 1 ResourceClaims", id="no answer for a claim"),
    ],
)
def test_an_answer_is_refused_with(kubelet: FakeKubelet, answered: list[str], problem: str) -> None:
    with odd_plugin(kubelet, answered):
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(KubeletError, match=problem):
            kubelet.prepare([ref("a")])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        pytest.param(PreparedDevice(("gpu/big",), "p", "d", ()), "request names", id="subrequest"),
        pytest.param(PreparedDevice(("gpu",), "p", "d", ("gpu-0",)), "vendor/class", id="CDI name"),
    ],
)
def test_a_device_is_refused_with(
    short: Path, kubelet: FakeKubelet, bad: PreparedDevice, problem: str
) -> None:
    class Odd(Desk):
        def prepare(self, ref: ClaimRef) -> list[PreparedDevice]:
            return [bad]

    with running(short, Odd()):
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(KubeletError, match=problem):
            kubelet.prepare([ref("a")])


def test_a_prepared_claim_is_not_prepared_again_until_the_kubelet_forgets(
    short: Path, kubelet: FakeKubelet
) -> None:
    desk = Desk()
    with running(short, desk):
        kubelet.wait_for_plugin(DRIVER)
        first = kubelet.prepare([ref("a")])
        assert kubelet.prepare([ref("a")]) == first
        assert desk.calls == [("prepare", "a")]
        kubelet.forget()
        assert kubelet.prepare([ref("a"), ref("b")])[ref("a").uid] == first[ref("a").uid]
    assert sorted(desk.calls) == [("prepare", "a"), ("prepare", "a"), ("prepare", "b")]


def test_devices_add_up_over_the_retries_of_a_pod(short: Path, kubelet: FakeKubelet) -> None:
    failures = ["no"]

    def tell(operation: str, ref: ClaimRef) -> None:
        if ref.name == "b" and failures:
            raise ClaimError(failures.pop())

    with running(short, Desk(tell)):
        kubelet.wait_for_plugin(DRIVER)
        with pytest.raises(KubeletError, match=r"NodePrepareResources failed .*default/b: no"):
            kubelet.prepare([ref("a"), ref("b")])
        assert kubelet.prepare([ref("a"), ref("b")]) == {
            ref("a").uid: (device(ref("a")), device(ref("a"))),
            ref("b").uid: (device(ref("b")),),
        }


def test_a_claim_of_the_same_name_waits_until_the_old_one_is_unprepared(
    short: Path, kubelet: FakeKubelet
) -> None:
    old, new = ref("a", "old"), ref("a", "new")
    with running(short):
        kubelet.wait_for_plugin(DRIVER)
        kubelet.prepare([old])
        with pytest.raises(KubeletError, match="different UID old still exists"):
            kubelet.prepare([new])
        kubelet.unprepare([old])
        assert kubelet.prepare([new])


def test_without_a_plugin_nothing_is_prepared(kubelet: FakeKubelet) -> None:
    with pytest.raises(KubeletError, match="is not registered"):
        kubelet.prepare([ref("a")], driver=DRIVER)


def test_hidden_names_and_files_that_are_no_sockets_are_ignored(
    short: Path, kubelet: FakeKubelet
) -> None:
    (kubelet.registry / "notes-reg.sock").touch()
    with running(short):
        kubelet.wait_for_plugin(DRIVER)
    assert not [r for r in kubelet.refusals if r.startswith(("notes", "."))]


def test_kubelets_before_1_33_know_one_instance_of_a_driver(short: Path) -> None:
    with FakeKubelet(short, minor=32) as kubelet, running(short, pod_uid="old"):
        kubelet.wait_for_plugin(DRIVER)
        with running(short, pod_uid="new") as new:
            kubelet.wait_until(
                lambda: [i.endpoint for i in kubelet.instances(DRIVER)] == [str(new.paths.service)],
                "the newer one",
            )
