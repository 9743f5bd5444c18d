"""python -m hack.testbed.kubelet_standin: runs until SIGTERM; the pods' processes end with it."""

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3

from dra_driver.base.errors import ApiServerError, DriverError, NotFound, Unreachable
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from hack.testbed.kubelet_standin.logs import LogServer
from hack.testbed.kubelet_standin.node import Node
from hack.testbed.kubelet_standin.pods import Pod, PodHost
from hack.testbed.kubelet_standin.shared_claims import SharedClaims
from hack.testbed.kubelet_standin.slices import SliceWiper
from tests.fakes.kubelet import FakeKubelet

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.3
_END_SECONDS = 5.0


def main() -> int:
    """Be the kubelet of one node."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        api = ApiClient(load_kubeconfig(options.kubeconfig), user_agent="kubelet-standin")
        pods: dict[str, Pod] = {}
        with (
            FakeKubelet(options.kubelet_dir.absolute(), options.minor) as kubelet,
            _logs(options, pods) as server,
        ):
            node = Node(api, options.node_name, options.minor, server.port if server else None)
            _serve(options, kubelet, node, pods, stop)
    except DriverError as error:
        print(f"kubelet_standin: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubelet_standin", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="an administrator's")
    parser.add_argument("--kubelet-dir", type=Path, required=True, help="plugins and pods lie here")
    parser.add_argument("--cdi-dir", type=Path, required=True, help="where the driver writes specs")
    parser.add_argument("--node-name", required=True)
    parser.add_argument("--pki", type=Path, help="the cluster's certificates, for kubectl logs")
    parser.add_argument("--minor", type=int, default=36, help="which Kubernetes 1.x to be")
    return parser


def _logs(
    options: argparse.Namespace, pods: dict[str, Pod]
) -> contextlib.AbstractContextManager[LogServer | None]:
    if options.pki is None:
        return contextlib.nullcontext()

    def find(namespace: str, name: str, container: str) -> Path | None:
        for pod in reversed([*pods.values()]):  # the newest of that name
            if pod.name == (namespace, name):
                return pod.output(container)
        return None

    return LogServer(options.pki, find)


def _serve(
    options: argparse.Namespace,
    kubelet: FakeKubelet,
    node: Node,
    pods: dict[str, Pod],
    stop: threading.Event,
) -> None:
    node.register()
    wiper = SliceWiper(
        node.api, node.name, lambda driver: any(i.connected for i in kubelet.instances(driver))
    )
    wiper.wipe_all()
    directory = options.kubelet_dir.absolute()
    deleter = _deleter(options.kubeconfig)
    host = PodHost(
        node.api, SharedClaims(kubelet), directory / "pods", options.cdi_dir.absolute(), deleter
    )
    log.info("the node is ready", extra={"node": node.name})
    while not stop.wait(_LOOK_SECONDS):
        if not directory.is_dir():
            log.warning("the kubelet's directory is gone, and so are we")
            break
        try:
            node.beat()
            wiper.look()
            _look(node.api, node.name, host, pods)
        except ApiServerError as error:
            log.warning("looking again: %s", error)
    for pod in pods.values():
        pod.end()
    for pod in pods.values():
        pod.join(_END_SECONDS / len(pods))


def _look(api: ApiClient, node: str, host: PodHost, pods: dict[str, Pod]) -> None:
    """Take up new pods, and end those that are deleted or gone (a force-deleted one vanishes)."""
    items = api.list("/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"})["items"]
    by_uid = {item["metadata"]["uid"]: item for item in items}
    for uid, item in by_uid.items():
        if uid not in pods:
            pods[uid] = Pod(host, item)
        if item["metadata"].get("deletionTimestamp"):
            pods[uid].delete()
    for uid in [uid for uid in pods if uid not in by_uid]:
        pods.pop(uid).delete()


def _deleter(path: Path) -> Callable[[str, str, str], None]:
    """What deletes a pod for good, with no grace period, as only its kubelet may."""
    load: Any = kubernetes.config.new_client_from_config
    core = kubernetes.client.CoreV1Api(load(str(path)))

    def delete(namespace: str, name: str, uid: str) -> None:
        options = kubernetes.client.V1DeleteOptions(
            grace_period_seconds=0, preconditions=kubernetes.client.V1Preconditions(uid=uid)
        )
        try:
            core.delete_namespaced_pod(name, namespace, body=options, _request_timeout=10)
        except kubernetes.client.ApiException as error:
            if error.status in (404, 409):  # gone, or another pod of that name
                raise NotFound(f"pod {namespace}/{name} is gone") from error
            raise Unreachable(f"pod {namespace}/{name} cannot be deleted: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"pod {namespace}/{name} cannot be deleted: {error}") from error

    return delete


if __name__ == "__main__":
    sys.exit(main())
