"""One cluster: bring it up, heal it, stop and start its parts, and leave nothing behind."""

import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hack.testbed import assets, host, images, leftovers, machine, network, packages
from hack.testbed.cache import Progress, silent
from hack.testbed.components import CONTROL_PLANE, NODE, NODE_NAME, Flags
from hack.testbed.errors import ClusterError
from hack.testbed.layout import Layout, default_layout
from hack.testbed.preparation import prepare
from hack.testbed.processes import boot_id
from hack.testbed.running import Running, process_of
from hack.testbed.state import State, load_state

COMMAND_SECONDS = 120

Mode = Literal["full", "control-plane"]

# Upstream race, seen in 3 of 4 bursts of eight pods: the Node authorizer learns of a pod's claim
# from its own watch, and refuses the kubelet's GET when that is late ("no relationship found
# between node and this object"); the pod then waits 74 to 90 s. With this the node may always read.
_NODES_MAY_READ = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "testbed:nodes"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:node",
    },
    "subjects": [
        {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Group",
            "name": "system:nodes",
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Status:
    """What runs. `components` has a process number, or None, for each name."""

    version: str
    mode: Mode
    why: str | None
    components: Mapping[str, int | None]
    ready: bool


class Cluster:
    """The single-node cluster of this user on this machine: there is one at a time."""

    def __init__(
        self,
        version: str = assets.DEFAULT_VERSION,
        feature_gates: Mapping[str, bool] | None = None,
    ) -> None:
        self.version = version
        self.feature_gates = dict(feature_gates or {})
        self.layout: Layout = default_layout()

    @property
    def mode(self) -> Mode:
        """`full`, or `control-plane` where no containers can run; see `why`."""
        return "full" if self.why is None else "control-plane"

    @property
    def why(self) -> str | None:
        """The reason for having no node here; None where there is one."""
        state = self._state()
        return state.why if state else machine.why_no_node()

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Path:
        return self.layout.bin / "kubectl"

    @property
    def node_name(self) -> str:
        return NODE_NAME

    @property
    def kubelet_dir(self) -> Path:
        return self.layout.kubelet

    @property
    def device_plugins_dir(self) -> Path:
        """Where the kubelet listens for device plugins, and connects to their sockets."""
        return machine.DEVICE_PLUGINS

    @property
    def pod_resources_socket(self) -> Path:
        """Where the kubelet says which devices its pods have."""
        return self.layout.kubelet / "pod-resources" / "kubelet.sock"

    @property
    def static_pods_dir(self) -> Path:
        """Where the kubelet finds the manifests of static pods."""
        return self.layout.static_pods

    @property
    def cdi_dir(self) -> Path:
        """The only directory where this cluster's containerd looks for CDI specs."""
        return self.layout.cdi

    @property
    def logs(self) -> Path:
        return self.layout.logs

    def log(self, name: str) -> Path:
        """The log of one component."""
        return self.layout.log(name)

    def program(self, name: str, progress: Progress = silent) -> Path:
        """kubectl, ctr, helm and the like; built when it is not there yet."""
        return assets.find_program(name, self.version, progress)

    def up(self, progress: Progress = silent) -> None:
        """Bring up what is not running; return when the node is Ready."""
        state = self._state()
        self._refuse_other(state)
        if state and self.status().ready:
            progress(f"Kubernetes {self.version} is up already")
            return
        why = state.why if state else machine.why_no_node()
        packages.install(node=why is None, progress=progress)
        names = assets.CONTROL_PLANE + (assets.NODE if why is None else ())
        programs = assets.find_programs(names, self.version, progress)
        with self.layout.locked():
            state = self._adopt_or_begin(why, progress)
            prepare(self.layout, state, programs)
            self._launch(state, progress)
        progress(f"Kubernetes {self.version} is up: KUBECONFIG={self.kubeconfig}")

    def down(self, progress: Progress = silent) -> None:
        """End everything, remove everything. The programs stay in the cache."""
        if not self.layout.root.exists():
            progress("nothing is up")
            return
        with self.layout.locked():
            self._sweep(progress)
        progress("down: nothing is left")

    def status(self) -> Status:
        """What runs now, and whether all of it is well."""
        state = self._state()
        if state is None:
            names = CONTROL_PLANE + (NODE if self.mode == "full" else ())
            return Status(self.version, self.mode, self.why, dict.fromkeys(names), False)
        running = Running(self.layout, state)
        pids = running.pids()
        ready = all(pids.values()) and running.healthy()
        mode: Mode = "full" if state.node else "control-plane"
        return Status(state.version, mode, state.why, pids, ready)

    def start(self, name: str, *more: str) -> None:
        """Start one component and wait until it is well; running already is success, unless it is
        to get *more*: arguments besides its usual ones, until it is started again (feature gates
        of the kubelet alone, say: ``"--feature-gates=DevicePluginCDIDevices=true"``)."""
        with self.layout.locked():
            if more and process_of(self.layout, name).pid():
                raise ClusterError(f"{name} runs already: stop it before it gets {' '.join(more)}")
            running = self._running({name: more})
            running.begin(name)
            running.wait(name)
            running.wait_for_pods()

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop one component: SIGTERM asks it to, SIGKILL is a crash. Containers keep running."""
        with self.layout.locked():
            part = self._running().part(name)
            process_of(self.layout, name).stop(how, grace_seconds=part.grace_seconds)

    def restart(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(name, how)
        self.start(name)

    def import_images(self, archive: Path) -> None:
        """Make the images of an archive known to the node."""
        self._images("import", str(archive.absolute()))

    def tag_image(self, name: str, other: str) -> None:
        """Give an image of the node another name besides."""
        self._images("tag", "--force", name, other)

    def _images(self, *arguments: str) -> None:
        socket = str(self.layout.containerd_socket)
        command = [str(self.layout.bin / "ctr"), "--address", socket, "--namespace", "k8s.io"]
        answer = subprocess.run(
            [*command, "images", *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if answer.returncode != 0:
            raise ClusterError(f"containerd refused to {arguments}: {answer.stderr.strip()}")

    def _state(self) -> State | None:
        return load_state(self.layout.state)

    def _running(self, flags: Flags | None = None) -> Running:
        state = self._state()
        if state is None:
            raise ClusterError("no cluster is up: `hack/cluster up` brings one up")
        return Running(self.layout, state, flags)

    def _any_running(self) -> bool:
        return any(process_of(self.layout, name).pid() for name in CONTROL_PLANE + NODE)

    def _refuse_other(self, state: State | None) -> None:
        """One at a time: another version, or other feature gates, must go down first."""
        if state is None or self._same(state) or not self._any_running():
            return
        gates = ",".join(f"{k}={str(v).lower()}" for k, v in sorted(state.feature_gates.items()))
        raise ClusterError(
            f"Kubernetes {state.version} is up here, with "
            f"{f'feature gates {gates}' if gates else 'default feature gates'}: "
            "`hack/cluster down` first"
        )

    def _same(self, state: State) -> bool:
        return (state.version, state.feature_gates) == (self.version, self.feature_gates)

    def _adopt_or_begin(self, why: str | None, progress: Progress) -> State:
        """The cluster that is there, to be healed; else the record of a new one."""
        state = self._state()
        self._refuse_other(state)
        if state and self._same(state) and state.boot == boot_id():
            return state
        if state:
            progress("an earlier cluster is there that cannot be used again: removing it")
            self._sweep(progress)
        state = State(
            version=self.version,
            why=why,
            boot=boot_id(),
            ports=network.choose_ports(),
            feature_gates=self.feature_gates,
            made_directories=host.shared_directories_to_make() if why is None else [],
            sysctls=host.sysctls() if why is None else {},
            shares_root=why is None and not host.root_is_shared(),
        )
        state.save(self.layout.state)
        return state

    def _launch(self, state: State, progress: Progress) -> None:
        """Start what does not run, side by side where nothing has to wait for another."""
        running = Running(self.layout, state)
        progress(f"starting Kubernetes {self.version}; logs are in {self.layout.logs}")
        if not state.node:
            progress(f"the control plane alone: {state.why}")
        runtime = ("containerd",) if state.node else ()
        running.begin("etcd", *runtime)
        running.wait("etcd")
        running.begin("apiserver")
        running.wait(*runtime)
        if state.node:
            self._import_standard_images()
        running.wait("apiserver")
        running.create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", _NODES_MAY_READ)
        running.begin(*running.parts)
        running.wait(*running.parts)
        running.wait_settled()
        running.wait_for_pods()

    def _import_standard_images(self) -> None:
        archive = self.layout.images / "standard.tar"
        fresh = archive.with_suffix(".new")
        images.write_images(fresh, images.standard_images())
        if archive.exists() and archive.read_bytes() == fresh.read_bytes():
            fresh.unlink()
            return
        self.import_images(fresh)
        fresh.rename(archive)  # only now: what bears this name has been imported

    def _sweep(self, progress: Progress) -> None:
        """The end of a cluster, from whatever state it is in."""
        state = self._state()
        progress(f"removing the cluster in {self.layout.root}")
        recorded = {path.name for path in self.layout.pids.glob("*")}  # plugins and stand-ins, too
        for name in (
            *sorted(recorded - {*NODE, *CONTROL_PLANE}),
            *NODE[::-1],
            *CONTROL_PLANE[::-1],
        ):
            # Nothing of it is kept, so nobody needs the time to end in good order.
            process_of(self.layout, name).stop(signal.SIGKILL)
        if state is None or state.node:
            leftovers.kill_containers(self.layout.containerd_socket)
            leftovers.remove_bridge()
            leftovers.unmount(self.layout.root)
            leftovers.remove_cgroups()
            host.forget_node()
        if state and state.node:
            host.unmount_places(self.layout, state.version)
            host.restore_sysctls(state.sysctls)
            if state.shares_root:
                host.set_root_shared(False)
            host.remove_shared_directories(state.made_directories, self.layout.root)
        leftovers.empty(self.layout.root)
