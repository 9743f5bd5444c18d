"""What container runtimes write about a container: its OCI bundle, as containerd and CRI-O do."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONTAINERD = "run/containerd/io.containerd.runtime.v2.task/k8s.io"
CRIO = "run/containers/storage/overlay-containers"
DATA = "/var/lib/kubelet/plugins/gpu.nvidia.com"


def containerd(
    host_root: Path,
    container: str,
    name: str,
    claims: Iterable[str] = (),
    *,
    pod: tuple[str, str, str] = ("ml", "train", "pod-1"),
    kind: str = "container",
) -> Path:
    """The bundle of a container that was given something of *claims* (UIDs); where it is."""
    namespace, pod_name, pod_uid = pod
    annotations = {"io.kubernetes.cri.container-name": name} if kind == "container" else {}
    document = {
        "ociVersion": "1.2.0",
        "mounts": [*_usual(), *map(document_mount, claims)],
        "annotations": {
            "io.kubernetes.cri.container-type": kind,
            **annotations,
            "io.kubernetes.cri.sandbox-id": "f" * 64,
            "io.kubernetes.cri.sandbox-name": pod_name,
            "io.kubernetes.cri.sandbox-namespace": namespace,
            "io.kubernetes.cri.sandbox-uid": pod_uid,
        },
    }
    return write(host_root / CONTAINERD / container, document)


def crio(
    host_root: Path,
    container: str,
    name: str,
    claims: Iterable[str] = (),
    *,
    pod: tuple[str, str, str] = ("ml", "train", "pod-1"),
) -> Path:
    """The same as CRI-O writes it; a sandbox is called POD."""
    namespace, pod_name, pod_uid = pod
    document = {
        "ociVersion": "1.2.0",
        "mounts": [*_usual(), *map(document_mount, claims)],
        "annotations": {
            "io.kubernetes.cri-o.ContainerType": "sandbox" if name == "POD" else "container",
            "io.kubernetes.container.name": name,
            "io.kubernetes.pod.name": pod_name,
            "io.kubernetes.pod.namespace": namespace,
            "io.kubernetes.pod.uid": pod_uid,
        },
    }
    return write(host_root / CRIO / container / "userdata", document)


def document_mount(claim: str) -> dict[str, Any]:
    """What a claim's CDI spec mounts for one of its requests."""
    inside = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims"
    return {
        "destination": f"{inside}/{claim}/gpu/gpu.nvidia.com-metadata.json",
        "type": "",
        "source": f"{DATA}/metadata/{claim}_gpu.json",
        "options": ["ro", "bind"],
    }


def write(bundle: Path, document: Any) -> Path:
    bundle.mkdir(parents=True, exist_ok=True)
    config = bundle / "config.json"
    config.write_text(document if isinstance(document, str) else json.dumps(document))
    return config


def _usual() -> list[dict[str, Any]]:
    return [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
        {
            "destination": "/etc/hosts",
            "type": "bind",
            "source": "/var/lib/kubelet/pods/pod-1/etc-hosts",
            "options": ["rbind", "rprivate", "rw"],
        },
    ]
