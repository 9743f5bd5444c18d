"""The files that the components are configured by, as text."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from hack.testbed.assets import minor
from hack.testbed.images import PAUSE
from hack.testbed.layout import Layout
from hack.testbed.machine import CGROUP, cgroup_v1
from hack.testbed.network import BRIDGE, DNS_ADDRESS, POD_CIDR

MAX_PODS = 250
FIRST_WITH_FIELD = {"containerRuntimeEndpoint": 27, "podLogsDir": 30, "failCgroupV1": 31}
NETWORK = "dra-testbed"  # also how the runtime names its records of pods on this network


def kubeconfig(pki: Path, user: str, port: int) -> str:
    """For one of the clients in the pki directory; with the keys inside, so it can be copied."""

    def inline(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "dra-testbed",
            "clusters": [
                {
                    "name": "dra-testbed",
                    "cluster": {
                        "server": f"https://127.0.0.1:{port}",
                        "certificate-authority-data": inline("ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": inline(f"{user}.crt"),
                        "client-key-data": inline(f"{user}.key"),
                    },
                }
            ],
            "contexts": [
                {
                    "name": "dra-testbed",
                    "context": {
                        "cluster": "dra-testbed",
                        "user": user,
                    },
                }
            ],
        }
    )


def kubelet_config(
    version: str, layout: Layout, ports: Mapping[str, int], feature_gates: Mapping[str, bool]
) -> str:
    """KubeletConfiguration: on loopback, on its own directories, never short of disk. A field that
    this version of Kubernetes does not know is left out: it would be an error."""
    config: dict[str, object] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": ports["kubelet"],
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": ports["kubelet-health"],
        "tlsCertFile": str(layout.pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet-server.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": layout.container_runtime,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "clusterDNS": [DNS_ADDRESS],  # nobody answers there; without one each pod gets a warning
        "clusterDomain": "cluster.local",
        "podLogsDir": str(layout.pod_logs),
        "staticPodPath": str(layout.static_pods),
        "volumePluginDir": str(layout.kubelet / "volume-plugins"),
        "makeIPTablesUtilChains": False,  # leaves the machine's iptables alone
        "maxPods": MAX_PODS,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            name: "0%"
            for name in (
                "imagefs.available",
                "imagefs.inodesFree",
                "nodefs.available",
                "nodefs.inodesFree",
            )
        },
        "nodeStatusUpdateFrequency": "2s",  # what is new there is reported at once,
        "nodeStatusReportFrequency": "5m",  # and what is not as seldom as by default
        "featureGates": dict(feature_gates),
    }
    if cgroup_v1():
        config["failCgroupV1"] = False
    known = {
        name: value
        for name, value in config.items()
        if minor(version) >= FIRST_WITH_FIELD.get(name, 0)
    }
    return yaml.safe_dump(known)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What containerd is told of this machine."""

    runc: Path
    cni_plugins: Path
    snapshotter: str
    may_lower_oom_score: bool


def containerd_config(layout: Layout, runtime: Runtime) -> str:
    """containerd's own root, state and sockets: another containerd here is not touched."""
    # `opt` would make /opt/containerd, NRI a socket in /var/run; nobody here uses either.
    return f"""\
version = 3
root = "{layout.containerd}"
state = "{layout.containerd_state}"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
address = "{layout.containerd_socket}"

[plugins.'io.containerd.nri.v1.nri']
disable = true

[plugins.'io.containerd.shim.v1.manager']
socket_dir = "{layout.shim_sockets}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "{runtime.snapshotter}"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE}"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = {str(not runtime.may_lower_oom_score).lower()}
netns_mounts_under_state_dir = true
enable_cdi = true
cdi_spec_dirs = ["{layout.cdi}"]

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{runtime.cni_plugins}"]
conf_dir = "{layout.cni_config}"
use_internal_loopback = true

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "{runtime.runc}"
Root = "{layout.containerd_state}/runc"
SystemdCgroup = false
"""


def cni_config(layout: Layout) -> str:
    """Pods on a bridge, with addresses from a directory of ours; no masquerading, no iptables."""
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": NETWORK,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": BRIDGE,
                    "isGateway": True,
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(layout.cni_addresses),
                        "ranges": [[{"subnet": POD_CIDR}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        },
        indent=2,
    )
