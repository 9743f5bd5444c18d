"""Where everything of a cluster lies: one directory that `down` removes."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hack.testbed.errors import ClusterError
from hack.testbed.waits import wait_for

# Short on purpose: a unix socket path has at most 107 characters, and the longest one here,
# kubelet/plugins_registry/gpu.nvidia.com-<36 characters>-reg.sock, takes 106 of them.
ROOT = Path(os.environ.get("TESTBED_ROOT", "/var/lib/dra-testbed"))  # hack/lib/apart sets another
LOCK_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one cluster, below one root directory."""

    root: Path

    @property
    def state(self) -> Path:
        """What `up` decided: version, mode, ports, what was there before."""
        return self.root / "cluster.json"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def configs(self) -> Path:
        return self.root / "config"

    @property
    def bin(self) -> Path:
        """Links to the programs, by the names they act by."""
        return self.root / "bin"

    @property
    def pids(self) -> Path:
        return self.root / "pids"

    @property
    def logs(self) -> Path:
        """One log per component, and `pods/` with those of the containers."""
        return self.root / "logs"

    @property
    def pod_logs(self) -> Path:
        return self.logs / "pods"

    @property
    def audit_log(self) -> Path:
        """What service accounts asked of the API server, as JSON lines."""
        return self.logs / "audit.log"

    @property
    def kubeconfig(self) -> Path:
        return self.configs / "admin.kubeconfig"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def device_plugins(self) -> Path:
        """Mounted where the kubelet has it: nothing of an earlier one is there, or stays."""
        return self.root / "device-plugins"

    @property
    def static_pods(self) -> Path:
        """Where the kubelet finds the manifests of static pods."""
        return self.root / "static-pods"

    @property
    def cdi(self) -> Path:
        """The only directory in which this containerd looks for CDI specs."""
        return self.root / "cdi"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def containerd_state(self) -> Path:
        return self.root / "run"

    @property
    def containerd_socket(self) -> Path:
        return self.containerd_state / "containerd.sock"

    @property
    def container_runtime(self) -> str:
        """Where the kubelet finds containerd."""
        return f"unix://{self.containerd_socket}"

    @property
    def shim_sockets(self) -> Path:
        """containerd refuses a path of more than 42 characters here."""
        return self.root / "s"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def cni_config(self) -> Path:
        return self.root / "cni"

    @property
    def cni_addresses(self) -> Path:
        return self.root / "addresses"

    def log(self, component: str) -> Path:
        return self.logs / f"{component}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes this cluster meanwhile. The lock goes away with the directory."""
        descriptor = -1

        def taken() -> bool:
            nonlocal descriptor
            descriptor = _lock(self.root)
            return descriptor >= 0

        wait_for(f"another command to let go of {self.root}", taken, timeout_seconds=LOCK_SECONDS)
        try:
            yield
        finally:
            with suppress(OSError):
                self.root.rmdir()  # succeeds only when nothing is left in it
            os.close(descriptor)


def _lock(directory: Path) -> int:
    """A descriptor that holds the lock of this directory, or -1 while another has it."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # `down` may have removed the directory between the two calls above.
        if os.fstat(descriptor).st_ino == directory.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return -1


def default_layout() -> Layout:
    """Root's cluster lies in /var/lib, anybody else's in a private temporary directory."""
    if os.geteuid() == 0:
        return Layout(ROOT)
    root = Path(tempfile.gettempdir()) / f"dra-testbed-{os.geteuid()}"
    if root.is_symlink() or (root.exists() and root.stat().st_uid != os.geteuid()):
        raise ClusterError(f"{root} belongs to somebody else; set TMPDIR to a directory of yours")
    return Layout(root)
