"""Where pods and containers are in the cgroup file system, and which of them a process is in.

The kubelet makes a directory for each pod and the container runtime one in it for each container
(``<kubepods>/<QoS>/<pod>/<container>``), in the spelling of its cgroup driver::

    cgroupfs  kubepods/burstable/pod<uid>/<id>
    systemd   kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/
                  cri-containerd-<id>.scope

A guaranteed pod has no level for its QoS class, systemd writes a UID with ``_``, and what the
kubelet's ``--cgroup-root`` says comes in front. cgroup v1 has such a tree for each controller; the
kubelet makes and removes a pod's directory in all of them, so one is looked at.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.claims import PodUid

_UID: Final = "[0-9A-Za-z]+(?:[-_][0-9A-Za-z]+)*"
# Relative to the cgroup namespace of who reads it, a path can begin with "..", which stands for
# kubepods or a level of it.
_ABOVE_A_POD: Final = frozenset({"kubepods", "burstable", "besteffort", ".."})
_POD: Final = re.compile(f"pod(?P<uid>{_UID})")
_POD_SLICE: Final = re.compile(
    rf"(?:.+-)?kubepods(?:-burstable|-besteffort)?-pod(?P<uid>{_UID})\.slice"
)
# With a runtime on cgroupfs under a kubelet on systemd, both are one name.
_POD_AND_CONTAINER: Final = re.compile(
    f"(?P<pod>{_POD_SLICE.pattern}):[a-z-]+:(?P<id>[0-9a-f]{{64}})"
)
_CONTAINER: Final = re.compile(r"(?:[a-z-]+-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_MONITOR: Final = "crio-conmon-"  # CRI-O's own process beside each container, named after it
_PODS: Final = re.compile(r"kubepods|(?:.+-)?kubepods\.slice")
_DEEPEST: Final = 4  # levels that --cgroup-root has at most
_USUAL_TREE: Final = "memory"  # of cgroup v1: the kubelet does not start without this controller

ChangeCgroup = Callable[[Path], object]


@frozen
class ContainerRef:
    """The container that a process is in."""

    pod: PodUid
    container: str  # its id, as the container runtime calls it: 64 hexadecimal digits


def container_of_process(text_of_proc_cgroup: str) -> ContainerRef | None:
    """Which container ``/proc/<pid>/cgroup`` tells of; None: none, or more than one.

    The outermost pod counts: a container can make cgroups with any name, but only inside its own.
    On cgroup v1 a container that may can leave one tree but not all of them: when two controllers
    do not agree, the answer is None.
    """
    # At line feeds alone: the kernel lets no cgroup have one in its name, anything else it does.
    lines = text_of_proc_cgroup.split("\n")
    paths = (line.split(":", 2)[2] for line in lines if line.count(":") > 1)
    places = {place for path in paths if (place := _container_ref(path)) is not None}
    return places.pop() if len(places) == 1 else None


def _container_ref(path: str) -> ContainerRef | None:
    parts = path.strip("/").split("/")
    for index, part in enumerate(parts):
        if combined := _POD_AND_CONTAINER.fullmatch(part):
            return ContainerRef(_uid(combined["uid"]), combined["id"])
        if pod_uid := pod_uid_of(part, parts[index - 1] if index else ""):
            container = container_id_of(parts[index + 1]) if index + 1 < len(parts) else None
            return ContainerRef(pod_uid, container) if container else None
    return None


def pod_uid_of(name: str, parent: str) -> PodUid | None:
    """The pod whose directory is called *name* inside *parent*."""
    if match := _POD_SLICE.fullmatch(name):
        return _uid(match["uid"])
    match = _POD.fullmatch(name) if parent in _ABOVE_A_POD else None
    return _uid(match["uid"]) if match else None


def container_id_of(name: str) -> str | None:
    """The id of the container whose directory is called *name* inside its pod's."""
    match = None if name.startswith(_MONITOR) else _CONTAINER.fullmatch(name)
    return match["id"] if match else None


def _uid(written: str) -> PodUid:
    return PodUid(written.replace("_", "-"))


def cgroup_root(host_root: Path) -> Path:
    """The host's cgroup file system as this process sees it below *host_root*.

    Where that is what this process has at the usual place, too, it is called so: NVML documents
    that path.
    """
    usual, hosts = Path("/sys/fs/cgroup"), host_root / "sys/fs/cgroup"
    try:
        return usual if os.path.samefile(usual, hosts) else hosts
    except OSError:
        return hosts


class Cgroups:
    """The directories of pods below *root*: of cgroup v2, or of one controller of v1.

    *make* and *remove* do it to an empty cgroup, as the kernel does. What is asked for and cannot
    be looked at now is a NodeError: that is not the same as a directory that is not there.
    """

    def __init__(
        self, root: Path, make: ChangeCgroup = os.mkdir, remove: ChangeCgroup = os.rmdir
    ) -> None:
        self.root = root
        self.make = make
        self.remove = remove
        self._kubepods: tuple[Path, ...] = ()  # where pods are: kubepods, kubepods.slice

    @property
    def unified(self) -> bool:
        """Whether it is cgroup v2."""
        return (self.root / "cgroup.controllers").is_file()

    def controllers(self) -> frozenset[str]:
        """The controllers of cgroup v2; none on v1."""
        try:
            return frozenset((self.root / "cgroup.controllers").read_text().split())
        except OSError:
            return frozenset()

    def pod(self, pod: PodUid) -> Path | None:
        """The directory of *pod*; None: it is not there (yet, any more, or on this node)."""
        return self.pods([pod]).get(pod)

    def pods(self, pods: Iterable[PodUid]) -> Mapping[PodUid, Path]:
        """The directories of those of *pods* that have one."""
        wanted = [pod for pod in pods if re.fullmatch(_UID, pod)]
        found = self._directories(wanted)
        # Where pods appear has to be known only to say that one is not there.
        if len(found) < len(wanted) and self._find_again():
            found = self._directories(wanted)
        return found

    def all_pods(self) -> Mapping[PodUid, Path]:
        """The directory of every pod of this node."""
        return {
            pod: path
            for level in self.levels()
            for path in subdirectories(level)
            if (pod := pod_uid_of(path.name, level.name)) is not None
        }

    def levels(self) -> tuple[Path, ...]:
        """The directories in which those of pods appear, one for each QoS class, as far as they
        are there."""
        self._find_again()
        return tuple(level for level in self._possible_levels() if _is_there(level))

    def _possible_levels(self) -> Iterator[Path]:
        return (level for base in self._kubepods for level in (base, *_classes(base)))

    def _directories(self, pods: Iterable[PodUid]) -> dict[PodUid, Path]:
        directories = ((pod, _pod_directory(self._possible_levels(), pod)) for pod in pods)
        return {pod: directory for pod, directory in directories if directory is not None}

    def _find_again(self) -> bool:
        """Find out where pods are, unless they are still where they were. Whether that was done."""
        if self._kubepods and all(map(_is_there, self._kubepods)):
            return False
        trees = [self.root]
        if not self.unified:
            trees = sorted(subdirectories(self.root), key=lambda tree: tree.name != _USUAL_TREE)
        found = (tuple(_find_pods(tree)) for tree in trees)
        self._kubepods = next(filter(None, found), ())
        return True


def container_cgroups(pod: Path) -> Iterator[tuple[str, Path]]:
    """Each container with a directory inside that of a pod: its id, and where it is.

    NodeError: it cannot be looked at now, so there may be any number.
    """
    for path in subdirectories(pod):
        if container := container_id_of(path.name):
            yield container, path


def subdirectories(directory: Path) -> list[Path]:
    """Those directly in *directory*; none where that is not there. NodeError: not known now."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error


def _find_pods(tree: Path) -> Iterator[Path]:
    level = [tree]
    for _ in range(_DEEPEST + 1):
        inside = [path for directory in level for path in subdirectories(directory)]
        yield from (path for path in inside if _PODS.fullmatch(path.name))
        level = [path for path in inside if not _PODS.fullmatch(path.name)]


def _is_there(directory: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(directory).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: OSError) -> NodeError:
    return NodeError(
        f"the cgroups in {directory} cannot be looked at now: {error.strerror}; it is tried again"
    )


def _classes(base: Path) -> tuple[Path, Path]:
    if base.name.endswith(".slice"):
        stem = base.name.removesuffix(".slice")
        return base / f"{stem}-burstable.slice", base / f"{stem}-besteffort.slice"
    return base / "burstable", base / "besteffort"


def _pod_directory(levels: Iterable[Path], pod: PodUid) -> Path | None:
    candidates = (level / _pod_name(level, pod) for level in levels)
    return next((path for path in candidates if _is_there(path)), None)


def _pod_name(level: Path, pod: PodUid) -> str:
    if level.name.endswith(".slice"):
        return f"{level.name.removesuffix('.slice')}-pod{pod.replace('-', '_')}.slice"
    return f"pod{pod}"
