"""The programs that run, each with its command line and how it is seen to be well."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hack.testbed import audit
from hack.testbed.api import ApiServer, answers
from hack.testbed.assets import minor
from hack.testbed.configs import FIRST_WITH_FIELD
from hack.testbed.layout import Layout
from hack.testbed.network import SERVICE_CIDR
from hack.testbed.packages import SYSTEM_PATH

NODE_NAME = "dra-testbed"

CONTROL_PLANE = ("etcd", "apiserver", "controller-manager", "scheduler")
NODE = ("containerd", "kubelet")

# Only those that may be off are named: v1 is on by default from Kubernetes 1.34 on. Before, the
# versions here have no DRA that anybody uses.
_RESOURCE_VERSIONS = ("v1beta1", "v1beta2", "v1alpha3")
_FIRST_WITH_DRA = 34

# What nobody here has: volumes that are attached, services, certificates that are asked for, pods
# that are scaled or belong to a ReplicationController, Nodes whose kubelets are told how long to
# keep what they read. Idle they take half of the controller manager's CPU time.
_CONTROLLERS_OFF = (
    "attachdetach",
    "csrapproving",
    "csrcleaner",
    "csrsigning",
    "endpoint",
    "endpointslice",
    "endpointslicemirroring",
    "ephemeral-volume",
    "horizontalpodautoscaling",
    "persistentvolume-binder",
    "persistentvolume-expander",
    "pv-protection",
    "pvc-protection",
    "replicationcontroller",
    "ttl",
)


@dataclass(frozen=True, slots=True)
class Component:
    """One program of the cluster. `healthy` asks once and never waits for long."""

    name: str
    program: str
    arguments: tuple[str, ...]
    healthy: Callable[[], bool]
    grace_seconds: float = 10


Flags = Mapping[str, tuple[str, ...]]
"""More arguments, by component. The last of two for the same flag counts."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the command lines depend on."""

    version: str
    layout: Layout
    ports: Mapping[str, int]
    feature_gates: Mapping[str, bool]
    flags: Flags = field(default_factory=dict)

    def api(self) -> ApiServer:
        return ApiServer(self.layout.pki, self.ports["apiserver"])

    def gates(self) -> tuple[str, ...]:
        pairs = [f"{name}={str(on).lower()}" for name, on in sorted(self.feature_gates.items())]
        return (f"--feature-gates={','.join(pairs)}",) if pairs else ()

    def runtime_config(self) -> tuple[str, ...]:
        if minor(self.version) < _FIRST_WITH_DRA:
            return ()
        settings = ",".join(f"resource.k8s.io/{version}=true" for version in _RESOURCE_VERSIONS)
        return (f"--runtime-config={settings}",)


def components(site: Site, *, node: bool) -> list[Component]:
    """All of them, in the order in which they start."""
    parts = [_etcd(site), _apiserver(site), _controller_manager(site), _scheduler(site)]
    parts += [_containerd(site), _kubelet(site)] if node else []
    return [
        replace(part, arguments=part.arguments + site.flags.get(part.name, ())) for part in parts
    ]


def environment(site: Site) -> dict[str, str]:
    """The same for everybody: a proxy or a kubeconfig of the caller has no say here."""
    path = f"{site.layout.bin}:{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return {
        "PATH": path,
        "HOME": str(site.layout.root),
        "TMPDIR": str(site.layout.root),
        # They take an eighth less CPU time when they collect less often; the API server then has
        # 800 MB at most, not 400.
        "GOGC": "400",
    }


def _etcd(site: Site) -> Component:
    client = f"http://127.0.0.1:{site.ports['etcd']}"
    peer = f"http://127.0.0.1:{site.ports['etcd-peer']}"
    return Component(
        "etcd",
        "etcd",
        (
            "--name=testbed",
            f"--data-dir={site.layout.etcd}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=testbed={peer}",
            "--log-level=warn",
            "--unsafe-no-fsync",  # a power cut loses the cluster, and `up` then makes another
        ),
        lambda: answers(f"{client}/health"),
    )


def _apiserver(site: Site) -> Component:
    pki = site.layout.pki
    port = site.ports["apiserver"]
    return Component(
        "apiserver",
        "kube-apiserver",
        (
            f"--etcd-servers=http://127.0.0.1:{site.ports['etcd']}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            "--endpoint-reconciler-type=none",  # it does not publish a loopback address
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--tls-cert-file={pki / 'apiserver.crt'}",
            f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--kubelet-certificate-authority={pki / 'ca.crt'}",
            f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
            # The node's name leads to 127.0.0.1 (/etc/hosts), where the kubelet listens.
            "--kubelet-preferred-address-types=Hostname",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--audit-policy-file={site.layout.configs / 'audit.yaml'}",
            f"--audit-log-path={site.layout.audit_log}",
            f"--audit-log-maxsize={audit.LOG_MEGABYTES}",
            "--audit-log-maxbackup=1",
            *site.runtime_config(),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
            f"--cert-dir={site.layout.configs}",
            *site.gates(),
            # On SIGTERM it stops listening at once, then waits a minute for the watches to end.
        ),
        lambda: site.api().ready(),
        grace_seconds=2,
    )


def _controller_manager(site: Site) -> Component:
    pki = site.layout.pki
    port = site.ports["controller-manager"]
    return Component(
        "controller-manager",
        "kube-controller-manager",
        (
            *_client(site, "controller-manager"),
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--controllers=*,{','.join(f'-{name}' for name in _CONTROLLERS_OFF)}",
            "--use-service-account-credentials=true",
            # At the default of 20 a second it takes 5 s to make its own service accounts.
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--flex-volume-plugin-dir={site.layout.root / 'volume-plugins'}",  # it makes it
            f"--service-account-private-key-file={pki / 'service-accounts.key'}",
            f"--root-ca-file={pki / 'ca.crt'}",
            f"--cluster-signing-cert-file={pki / 'ca.crt'}",
            f"--cluster-signing-key-file={pki / 'ca.key'}",
            *site.gates(),
        ),
        lambda: answers(f"https://127.0.0.1:{port}/healthz"),
    )


def _scheduler(site: Site) -> Component:
    port = site.ports["scheduler"]
    return Component(
        "scheduler",
        "kube-scheduler",
        (
            *_client(site, "scheduler"),
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            *site.gates(),
        ),
        lambda: answers(f"https://127.0.0.1:{port}/healthz"),
    )


def _client(site: Site, user: str) -> tuple[str, ...]:
    config = site.layout.configs / f"{user}.kubeconfig"
    return (
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
        "--leader-elect=false",
    )


def _containerd(site: Site) -> Component:
    config = site.layout.configs / "containerd.toml"
    return Component(
        "containerd",
        "containerd",
        (f"--config={config}",),
        lambda: _listens(str(site.layout.containerd_socket)),
    )


def _kubelet(site: Site) -> Component:
    layout = site.layout
    in_config = minor(site.version) >= FIRST_WITH_FIELD["containerRuntimeEndpoint"]
    endpoint = () if in_config else (f"--container-runtime-endpoint={layout.container_runtime}",)
    return Component(
        "kubelet",
        "kubelet",
        (
            f"--config={layout.configs / 'kubelet.yaml'}",
            f"--kubeconfig={layout.configs / 'kubelet.kubeconfig'}",
            f"--hostname-override={NODE_NAME}",
            f"--root-dir={layout.kubelet}",
            f"--cert-dir={layout.kubelet / 'pki'}",
            *endpoint,
            "--v=2",
        ),
        lambda: answers(f"http://127.0.0.1:{site.ports['kubelet-health']}/healthz"),
    )


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
