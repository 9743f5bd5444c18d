"""Containers of this machine, and the claims that each was given, from their OCI bundles.

The runtime writes a container's OCI bundle before the container's cgroup exists, and removes it
once no process of the container lives. Each request of a claim mounts a document
(`dra_driver.node.state.claim_files`), so the mounts tell the claims: of init containers and
ephemeral ones, of pods that joined a claim later, and on every Kubernetes, without asking anybody.

What a container was given never changes. A container that cannot be read now is not taken for one
without claims.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.kubeletplugin.device_metadata import METADATA_CONTAINER_DIRECTORY, claim_uid_of_file

log = logging.getLogger(__name__)

T = TypeVar("T")

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
NO_RUNTIME_STATE: Final = (
    "no container runtime keeps its state where it is looked for, so containers of a pod that use "
    "different claims cannot be told apart, and pods that join a claim are noticed late: limits "
    "and memory guard take the pod as a whole; say where it is with --runtime-dir"
)
_FIRST_PROCESS: Final = "init.pid"
_MAX_BYTES: Final = 16 * 1024 * 1024  # a container comes in one message of that much at most
_MOST_REMEMBERED: Final = 4096  # containers; a node has some hundred
# The annotations of containerd, and of CRI-O.
_NAME_KEYS: Final = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name")
_POD_UID_KEYS: Final = ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid")
_POD_NAME_KEYS: Final = ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name")
_NAMESPACE_KEYS: Final = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")
_KIND_KEYS: Final = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_SANDBOX: Final = "POD"  # CRI-O's name for what only keeps the pod's namespaces


class NoContainer(Enum):
    """Why there is no container to an id."""

    GONE = "gone"  # no process of it lives any more
    SANDBOX = "sandbox"  # it keeps the pod's namespaces, or is not the kubelet's: it has no claim
    NOWHERE = "nowhere"  # no runtime keeps its state where it is looked for: nothing is known


class ContainerBundles:
    """Reads the bundles of the containers that run on this machine."""

    def __init__(self, host_root: Path, runtime_dir: str = "") -> None:
        """*runtime_dir*: where containerd keeps its state below *host_root*, if not as usual."""
        self._host_root = host_root
        own = f"{runtime_dir.strip('/')}/{_CONTAINERD}"
        self._bundles: Sequence[str] = (own, *_BUNDLES) if runtime_dir else _BUNDLES
        self._directories = sorted({bundle.partition("/{id}")[0] for bundle in self._bundles})
        self._warned = False
        self._known: dict[str, Container | NoContainer] = {}  # a bundle's content never changes

    def find(self, id_: str) -> Container | NoContainer:
        """The container with that id, or why there is none.

        NodeError: it cannot be read now (too many open files, an error of the disk, half written),
        so it may have any claim. To be asked again.
        """
        if (known := self._known.get(id_)) is not None:
            return known
        for bundle in self._bundles:
            config = self._host_root / bundle.format(id=id_) / "config.json"
            if (text := _read(config)) is not None:
                if len(self._known) >= _MOST_REMEMBERED:
                    self._known = {}
                return self._known.setdefault(id_, _container(id_, config, text))
        if self.runtime_directories():
            return NoContainer.GONE
        if not self._warned:
            self._warned = True
            log.warning("%s", NO_RUNTIME_STATE)
        return NoContainer.NOWHERE

    def all(self) -> tuple[Container, ...]:
        """The containers that have a bundle; some may have ended.

        NodeError: one of them cannot be read now.
        """
        containers = (self._started(id_) for id_ in self._ids())
        return tuple(container for container in containers if isinstance(container, Container))

    def first_process(self, id_: str) -> int | None:
        """The number of the container's first process, as containerd wrote it; None: it did not.
        The process may have ended. NodeError: that cannot be read now.
        """
        for bundle in self._bundles:
            text = _read(self._host_root / bundle.format(id=id_) / _FIRST_PROCESS)
            if text is not None and text.strip().isdigit():
                return int(text)
        return None

    def runtime_directories(self) -> tuple[str, ...]:
        """The directories with bundles that exist, as the host calls them; none: the runtime is
        elsewhere. NodeError: they cannot be looked at now.
        """
        return tuple(
            f"/{directory}"
            for directory in self._directories
            if _look(os.stat, self._host_root / directory) is not None
        )

    def _ids(self) -> list[str]:
        listings = (_look(os.listdir, self._host_root / path) or () for path in self._directories)
        return sorted({id_ for ids in listings for id_ in ids})

    def _started(self, id_: str) -> Container | NoContainer:
        """GONE, too, while it is being made and has no process yet."""
        try:
            return self.find(id_)
        except NodeError as error:
            if isinstance(error.__cause__, OSError):
                raise
            return NoContainer.GONE  # half written


def _container(id_: str, config: Path, text: bytes) -> Container | NoContainer:
    try:
        document: Any = json.loads(text)
        annotations = document.get("annotations") or {}
        name = _first(annotations, _NAME_KEYS)
        if not name or name == _SANDBOX or _first(annotations, _KIND_KEYS) == "sandbox":
            return NoContainer.SANDBOX
        return Container(
            id_,
            name,
            _first(annotations, _NAMESPACE_KEYS),
            Pod(_first(annotations, _POD_NAME_KEYS), PodUid(_first(annotations, _POD_UID_KEYS))),
            frozenset(_claims(document.get("mounts") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(config, f"it is not a container's configuration ({error})") from error


def _first(annotations: Mapping[str, str], keys: Sequence[str]) -> str:
    return next((value for key in keys if (value := annotations.get(key))), "")


def _claims(mounts: Sequence[Mapping[str, str]]) -> Iterator[ClaimUid]:
    for mount in mounts:
        is_metadata = mount["destination"].startswith(f"{METADATA_CONTAINER_DIRECTORY}/")
        uid = claim_uid_of_file(mount.get("source", "").rpartition("/")[2]) if is_metadata else None
        if uid is not None:
            yield uid


def _read(config: Path) -> bytes | None:
    """None: it is not there."""

    def read(path: Path) -> bytes:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)

    text = _look(read, config)
    if text is not None and len(text) > _MAX_BYTES:
        raise _unreadable(config, f"it has more than {_MAX_BYTES} bytes")
    return text


def _look(read: Callable[[Path], T], path: Path) -> T | None:
    """What *read* answers of *path*; None: it is not there. NodeError: it cannot be read now."""
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, f"{error.strerror}") from error


def _unreadable(path: Path, why: str) -> NodeError:
    return NodeError(
        f"which claims a container was given cannot be read at {path}: {why}; it is tried again"
    )


FindContainer = Callable[[str], Container | NoContainer]
"""The container with an id; NodeError: not known now. ``ContainerBundles.find``."""


class PodContainerCache:
    """The containers of pods while they have cgroups, and their claims. For several threads."""

    def __init__(self, find: FindContainer) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._read: dict[str, Container | None] = {}  # None: one that is given nothing
        self._known: tuple[Container, ...] = ()
        self._hidden: frozenset[PodUid] = frozenset()
        self._error = ""

    @property
    def known(self) -> tuple[Container, ...]:
        """The containers that were given claims: the same object until that changes."""
        return self._known

    @property
    def hidden(self) -> frozenset[PodUid]:
        """The pods with containers of which nothing is known, at the last ``learn``."""
        return self._hidden

    def claims_of(self, container_id: str) -> frozenset[ClaimUid]:
        """The claims that the container was given, as far as known."""
        container = self._read.get(container_id)
        return container.claims if container else frozenset()

    def learn(self, list_containers: Callable[[], Mapping[PodUid, Collection[str]]]) -> bool:
        """Read the containers that are new; *list_containers* says which have cgroups. Containers
        that were known before and are gone are forgotten; one that appears meanwhile is not.

        False: not all could be read, which may work the next time. After an error of
        *list_containers* everything known stays.
        """
        with self._lock:
            gone = set(self._read)
        by_pod = list_containers()
        gone.difference_update(*by_pod.values())
        with self._lock:
            self._read = {id_: known for id_, known in self._read.items() if id_ not in gone}
            self._hidden = frozenset()
        read = [self.learn_new(pod, containers) for pod, containers in sorted(by_pod.items())]
        self._changed()
        return all(read)

    def learn_new(self, pod: PodUid, containers: Collection[str]) -> bool:
        """Read those of *containers* of *pod* that are new. False: not all could be read."""
        readable = True
        for id_ in sorted(containers):
            try:
                known = id_ in self._read or self._learn(pod, id_)
            except NodeError as error:
                self._warn(str(error))
                known = readable = False
            if not known:
                with self._lock:
                    self._hidden |= {pod}
        self._changed()
        return readable

    def _learn(self, pod: PodUid, id_: str) -> bool:
        """False: nothing is known of it."""
        container = self._find(id_)
        if container in (NoContainer.GONE, NoContainer.NOWHERE):
            return container is NoContainer.GONE
        known = None
        if isinstance(container, Container):  # its cgroup says for sure which pod it is in
            known = replace(container, pod=Pod(container.pod.name, pod))
        with self._lock:
            self._read[id_] = known
        return True

    def _changed(self) -> None:
        with self._lock:
            with_claims = [known for known in self._read.values() if known and known.claims]
            known = tuple(sorted(with_claims, key=lambda container: container.id))
            if known != self._known:
                self._known = known

    def _warn(self, error: str) -> None:
        if error != self._error:
            log.warning("who uses GPU memory is not known: %s", error)
        self._error = error
