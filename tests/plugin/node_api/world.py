"""A node that gives its GPUs out by one API or the other, and everything that this depends on."""

from pathlib import Path

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.k8s.pods import NodePod
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    DeviceId,
    ResourceName,
)
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.node_api.chooser import ApiChooser, ChoiceInputs
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.node_api.facts import ClusterFacts
from dra_driver.plugin.node_api.other_plugin import OtherDevicePlugin, PodsOfOthers

AUTO, DRA, DEVICE_PLUGIN = AllocationApi.AUTO, AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN
APIS = (DRA, DEVICE_PLUGIN)
NEW = ClusterFacts(True, (1, 36), "gpu.nvidia.com")
OLD = ClusterFacts(False, (1, 28), "")
NOBODY_ANSWERS = ClusterFacts()
SETTLE_SECONDS = 10.0


class Killed(BaseException):
    """The process is gone."""


class MortalFile(ServedApiFile):
    """Kills its process before or after a write, or has no room."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kill = ""
        self.full = False
        self.writes = 0

    def write(self, served: ServedApi) -> None:
        if self.full:
            raise NodeError("no space left on the disk")
        if self.kill == "before":
            raise Killed
        super().write(served)
        self.writes += 1
        if self.kill == "after":
            raise Killed


class World:
    """The node as it is now. ``step`` is what its plugin does once it is due."""

    def __init__(self, directory: Path, cluster: ClusterFacts = NEW) -> None:
        self.path = directory / "state/api.json"
        self.now = 1000.0
        self.asked: AllocationApi | None = AUTO
        self.cluster = cluster
        self.holders: dict[AllocationApi, tuple[str, ...] | None] = {DRA: (), DEVICE_PLUGIN: ()}
        self.asked_at = float("inf")  # who holds something
        self.gpu_holders: DevicePluginHolders | None = DevicePluginHolders()
        self.sockets: tuple[str, ...] = ()
        self.registered: dict[ResourceName, tuple[DeviceId, ...]] = {}  # as the kubelet has them
        self.containers: tuple[AllocatedContainer, ...] = ()  # with devices, by the kubelet
        self.checkpoint_error: NodeError | None = None
        self.running: set[PodUid] = set()  # pods with processes
        self.pods: dict[PodUid, NodePod] | None = {}  # None: the API server does not tell
        self.pod_lists = 0
        self.kubelet = 0
        self.is_newest = True
        self.api_server_is_away = False  # for who removes slices
        self.slices = False
        self.served: set[AllocationApi] = set()  # those that somebody serves, by what he was told
        self.looks = 0  # at the API server
        self.lists = 0  # of all claims
        self.start()

    def start(self) -> None:
        """A new process of the plugin."""
        self.node_api = NodeApi()
        self.node_api.listeners.append(self._act)
        self.file = MortalFile(self.path)
        inputs = ChoiceInputs(
            "nvidia.com/gpu",
            lambda: self.asked,
            self._look,
            self._holders,
            lambda: self.gpu_holders,
            OtherDevicePlugin(
                lambda: self.sockets,
                lambda: self.registered,
                PodsOfOthers(
                    self._containers,
                    self._containers,
                    self._list_pods,
                    lambda pod: pod.uid in self.running,
                    tuple,
                    ResourceNames(),
                ),
                lambda: self.now,
            ),
            lambda: not self.slices and not self._is_published,
            lambda: self.kubelet,
            lambda: self.is_newest,
        )
        self.chooser = ApiChooser(
            self.node_api, inputs, self.file, lambda: self.now, SETTLE_SECONDS
        )
        held = next((api for api in APIS if self.holders[api]), None)
        self.chooser.begin(held)
        self._act()

    def step(self, seconds: float = 0.0) -> float:
        """After *seconds* the plugin looks: in how many it looks again."""
        self.now += seconds
        self._act()  # as the publisher does, which tries again by itself
        return self.chooser.step()

    def settle(self, seconds: float = 120.0) -> None:
        """For so long nothing happens but what the plugin does by itself."""
        until = self.now + seconds
        wait = self.step()
        while self.now + wait <= until:
            wait = self.step(wait)

    def state(self, api: AllocationApi) -> ApiState:
        return self.node_api.state(api)

    @property
    def _is_published(self) -> bool:
        return self.state(DRA) is ApiState.ON

    def _look(self, again: bool) -> ClusterFacts:
        self.looks += 1
        return self.cluster

    def _holders(self, api: AllocationApi, since: float) -> tuple[str, ...] | None:
        self.lists += 1
        return self.holders[api] if self.asked_at >= since else None

    def _containers(self) -> tuple[AllocatedContainer, ...]:
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        return self.containers

    def _list_pods(self) -> dict[PodUid, NodePod] | None:
        self.pod_lists += 1
        return self.pods

    def _act(self) -> None:
        """What serves the APIs follows the choice."""
        self.served = {api for api in APIS if self.state(api) is not ApiState.OFF}
        if self.node_api.serving is not None and not self.api_server_is_away:
            self.slices = self._is_published
