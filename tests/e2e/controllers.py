"""Controllers as processes of this machine, each behind a proxy that sees what it writes."""

import base64
import http.client
import queue
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.driver_process import DriverProcess
from tests.e2e.driver import NAMESPACE
from tests.e2e.kube import Kube, wait

LEASE = "dra-driver-gpu-controller"
_LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
_LEASE_SECONDS = 4
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


class WriteProxy(ThreadingHTTPServer):
    """Forwards to the API server; *answered* is called with the method and path of each write to
    anything but a Lease or an event, when the API server did it and before the writer is told."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, kubeconfig: Path) -> None:
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self.target = urlsplit(cluster["server"])
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.tls = ssl.create_default_context(cadata=authority)
        self.answered: Callable[[str], None] = lambda write: None
        super().__init__(("127.0.0.1", 0), _Forwarder)
        threading.Thread(target=self.serve_forever, name="write proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a controller that is killed closes its connections."""


class _Forwarder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WriteProxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        target = self.server.target
        assert target.hostname
        server = http.client.HTTPSConnection(target.hostname, target.port, context=self.server.tls)
        names = ("Authorization", "Content-Type", "Accept", "User-Agent")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        try:
            server.request(self.command, self.path, body, headers)
            self._answer(server.getresponse())
        except OSError:  # one side is gone
            self.close_connection = True
        finally:
            server.close()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        is_other = "/leases" in self.path or "/events" in self.path
        if self.command in _WRITES and answer.status < 300 and not is_other:
            self.server.answered(f"{self.command} {self.path}")
        self.send_response(answer.status)
        for name in ("Content-Type", "Retry-After"):
            if value := answer.getheader(name):
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while chunk := answer.read1(65536):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815 - as the library has it

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would be told with every test."""


class Controller:
    """One replica, with exactly the rights of the chart's account."""

    def __init__(self, kube: Kube, directory: Path, name: str) -> None:
        self.kube = kube
        self.name = name
        self.log_path = directory / f"{name}.log"
        self.proxy = WriteProxy(kube.config)
        self.process: DriverProcess | None = None
        self._kubeconfig = directory / f"{name}.kubeconfig"
        user = {"token": _token(kube)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": self.proxy.url}}],
            "users": [{"name": "it", "user": user}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        self._kubeconfig.write_text(yaml.safe_dump(document))

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def start(self) -> None:
        """It follows, and leads when nobody else does."""
        flags = {
            "kubeconfig": self._kubeconfig,
            "revision-namespace": NAMESPACE,
            "lease-name": LEASE,
            "identity": self.name,
            "lease-seconds": _LEASE_SECONDS,
        }
        with self.log_path.open("ab") as log:
            self.process = DriverProcess(
                *("controller", *(f"--{name}={value}" for name, value in flags.items())),
                errors=log,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it, if it runs: its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(how)
        return process.wait(10)

    def kill(self) -> None:
        """Nobody waits for the rest of its lease: it is dead for sure."""
        self.stop(signal.SIGKILL)
        lease = self.kube.api.get(f"{_LEASES}/{LEASE}")
        if lease["spec"].get("holderIdentity") == self.name:
            free = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
            self.kube.api.patch(f"{_LEASES}/{LEASE}", free)

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        self.proxy.close()


class Controllers:
    """Two replicas."""

    def __init__(self, kube: Kube, directory: Path) -> None:
        self.kube = kube
        self.replicas = [Controller(kube, directory, f"controller-{n}") for n in "ab"]

    def start(self) -> None:
        """Until one of them leads."""
        for replica in self.replicas:
            if replica.process is None:
                replica.start()
        wait(f"a controller to lead: {self.logs()}", self.leader, 20)

    def leader(self) -> Controller | None:
        """Who leads by the Lease."""
        spec = self.kube.api.get(f"{_LEASES}/{LEASE}")["spec"]
        alive = (replica for replica in self.replicas if replica.process is not None)
        return next((each for each in alive if each.name == spec.get("holderIdentity")), None)

    def stop(self) -> list[int]:
        return [replica.stop() for replica in self.replicas]

    @contextmanager
    def killed_at_writes(self, *parts: str) -> Iterator[list[str]]:
        """Whoever writes to a path with one of *parts* in it dies at once, and is started again:
        the writes so far."""
        writes: list[str] = []
        dead: queue.SimpleQueue[Controller | None] = queue.SimpleQueue()

        def kill(replica: Controller, write: str) -> None:
            if replica.process is not None and any(part in write for part in parts):
                writes.append(write)
                replica.kill()
                dead.put(replica)

        def start_again() -> None:
            while replica := dead.get():
                replica.start()

        for replica in self.replicas:
            replica.proxy.answered = partial(kill, replica)
        thread = threading.Thread(target=start_again, daemon=True)
        thread.start()
        try:
            yield writes
        finally:
            for replica in self.replicas:
                replica.proxy.answered = lambda write: None
            dead.put(None)
            thread.join(10)

    def logs(self) -> str:
        return "\n".join(replica.log[-1500:] for replica in self.replicas)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


def _token(kube: Kube) -> str:
    accounts = [each["metadata"]["name"] for each in kube.all("ServiceAccount", NAMESPACE)]
    name = next(name for name in accounts if name.endswith("-controller"))
    path = f"{kube.path('ServiceAccount', NAMESPACE)}/{name}/token"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 7200},
    }
    return str(kube.api.create(path, request)["status"]["token"])
