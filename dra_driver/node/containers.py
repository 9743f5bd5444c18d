"""What a container is called in its pod, by the id that its container runtime gave it.

The runtime writes it as an annotation of the OCI bundle, before the container's cgroup exists.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid

log = logging.getLogger(__name__)

# Below the host's root. containerd keeps bundles in its state directory, which some distributions
# have elsewhere; CRI-O keeps them with its storage.
_CONTAINERD: Final = "io.containerd.runtime.v2.task/k8s.io/{id}"
_CRIO: Final = "containers/storage/overlay-containers/{id}/userdata"
_BUNDLES: Final = (
    f"run/containerd/{_CONTAINERD}",
    f"run/{_CRIO}",
    f"var/lib/{_CRIO}",
    f"run/k3s/containerd/{_CONTAINERD}",  # RKE2, too
    f"run/k0s/containerd/{_CONTAINERD}",
    f"var/snap/microk8s/common/run/containerd/{_CONTAINERD}",
)
NOWHERE: Final = (
    "no container runtime keeps its state where it is looked for, so containers of a pod that use "
    "different claims cannot be told apart: limits and memory guard take the pod as a whole; say "
    "where it is with --runtime-dir"
)
_ANNOTATIONS: Final = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name")
_SANDBOX: Final = "POD"  # CRI-O's name for what only keeps the pod's namespaces

Uses = Callable[[Collection[tuple[PodUid, str]]], Mapping[tuple[PodUid, str], Collection[ClaimUid]]]
"""Which claims containers use, each by its pod and what it is called. All are asked about at once;
one that is missing in the answer is not known."""


class Containers:
    """Reads the bundles of the containers that run on this machine."""

    def __init__(self, host_root: Path, runtime_dir: str = "") -> None:
        """*runtime_dir*: where containerd keeps its state below *host_root*, if not as usual."""
        self._host_root = host_root
        own = f"{runtime_dir.strip('/')}/{_CONTAINERD}"
        self._bundles: Sequence[str] = (own, *_BUNDLES) if runtime_dir else _BUNDLES
        self._told = False

    def name(self, container: str) -> str | None:
        """The name in the pod's spec; None: it is gone, it is the pod's sandbox, or the runtime is
        none of those that are known here, which is told once."""
        for bundle in self._bundles:
            place = self._host_root / bundle.format(id=container) / "config.json"
            if (name := _name(place)) is not None:
                return None if name == _SANDBOX else name
        if not self._told and not self.places():
            self._told = True
            log.warning("%s", NOWHERE)
        return None

    def places(self) -> tuple[str, ...]:
        """Where containers are found, as the host calls it; none: the runtime is elsewhere."""
        homes = sorted({bundle.partition("/{id}")[0] for bundle in self._bundles})
        return tuple(f"/{home}" for home in homes if (self._host_root / home).is_dir())

    def uses(self, claims_of: Uses) -> Uses:
        """*claims_of*, which takes containers by their names, for those by their ids."""

        def by_id(
            containers: Collection[tuple[PodUid, str]],
        ) -> Mapping[tuple[PodUid, str], Collection[ClaimUid]]:
            found = {(pod, id_): self.name(id_) for pod, id_ in containers}
            names = {key: (key[0], name) for key, name in found.items() if name is not None}
            told = claims_of(sorted(set(names.values()))) if names else {}
            return {key: told[named] for key, named in names.items() if named in told}

        return by_id


def _name(config: Path) -> str | None:
    try:
        document: Any = json.loads(config.read_bytes())
        annotations = document["annotations"]
        found = (annotations.get(key) for key in _ANNOTATIONS)
        return next((name for name in found if isinstance(name, str) and name), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # gone, half written, or nothing that Kubernetes started
