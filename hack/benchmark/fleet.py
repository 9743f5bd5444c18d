"""What our shape of a GPU costs the scheduler, in turns with one plain device a GPU."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from dra_driver.cluster.access import kubeconfig
from dra_driver.cluster.client import ApiServer, Timeouts
from dra_driver.model.devices import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.offer import Device, Keeps, Offer
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.offer import offer
from dra_driver.plan.publish import published
from hack.benchmark.bursts import Burst, Bursts
from hack.benchmark.figures import Measured, Results
from hack.benchmark.fleet_nodes import Document, Fleet, Shape
from hack.benchmark.sizes import FleetSizes
from hack.testbed.components import Flags
from hack.testbed.control_plane import ControlPlane, control_plane

Progress = Callable[[str], None]

_WARM_UP = 10  # pods
_READ_SECONDS = 60.0  # deleting hundreds of objects is one request
_LIFTED = ("--kube-api-qps=10000", "--kube-api-burst=10000")
_FLAGS: Flags = {
    # Nobody but the clients' own limits may hold up a request; nodes keep no taint that only a
    # kubelet takes away, and are not given up for being silent.
    "apiserver": (
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=0",
        "--max-mutating-requests-inflight=0",
        "--disable-admission-plugins=TaintNodesByCondition",
    ),
    "controller-manager": (*_LIFTED, "--controllers=*,-node-lifecycle-controller"),
}


def ours(gpus: Sequence[Gpu]) -> Sequence[Document]:
    """What a node without a profile publishes."""
    return published(offer(Inventory(tuple(gpus)), DEFAULT_PROFILE, Keeps(), {}))


def plain(gpus: Sequence[Gpu]) -> Sequence[Document]:
    """One exclusive device for each GPU, with the same attributes."""
    return published(Offer(tuple(Device(gpu) for gpu in gpus)))


def measure(version: str, sizes: FleetSizes, progress: Progress) -> Results:
    """All four figures: with the scheduler's default client limits, then without limits."""
    shapes = {"pods_per_second": ours, "plain_pods_per_second": plain}
    with control_plane(version, _FLAGS, progress) as there:
        api = ApiServer(kubeconfig(there.kubeconfig), Timeouts(read=_READ_SECONDS))
        fleet, bursts = Fleet(api, sizes.nodes), Bursts(api)
        course = Course(there, fleet, bursts, progress)
        limited = course.run(shapes, sizes.limited_pods, sizes.rounds)
        there.restart("scheduler", {"scheduler": _LIFTED})
        lifted = course.run(shapes, sizes.lifted_pods, sizes.rounds)
        api.close()
    found = {f"fleet_{name}": measured for name, measured in limited.items()}
    return found | {f"fleet_unthrottled_{name}": measured for name, measured in lifted.items()}


class Course:
    """Rounds of bursts, each shape once a round."""

    def __init__(
        self, there: ControlPlane, fleet: Fleet, bursts: Bursts, progress: Progress
    ) -> None:
        self._there = there
        self._fleet = fleet
        self._bursts = bursts
        self._progress = progress

    def run(self, shapes: Mapping[str, Shape], pods: int, rounds: int) -> Results:
        """The median of *rounds* for each of *shapes*; another one is first each time."""
        found: dict[str, list[Burst]] = {name: [] for name in shapes}
        for turn in range(rounds):
            for name in list(shapes)[:: -1 if turn % 2 else 1]:
                burst = self._burst(shapes[name], pods)
                found[name].append(burst)
                self._progress(
                    f"round {turn + 1}: {name} {burst.pods_per_second:.1f}, "
                    f"{burst.cpu_ms:.1f} ms of the scheduler's processor time a pod"
                )
        return {name: _measured(each) for name, each in found.items()}

    def _burst(self, shape: Shape, pods: int) -> Burst:
        self._fleet.publish(shape)
        # Some pods before: the scheduler has seen the slices, and the class's CEL is compiled.
        self._bursts.burst(_WARM_UP, self._there.pid("scheduler"))
        return self._bursts.burst(pods, self._there.pid("scheduler"))


def _measured(bursts: Sequence[Burst]) -> Measured:
    each = " ".join(f"{burst.pods_per_second:.1f}" for burst in bursts)
    spent = median(burst.cpu_ms for burst in bursts)
    where = f"rounds {each}; {spent:.1f} ms of the scheduler's processor time a pod"
    return Measured(median(burst.pods_per_second for burst in bursts), where, len(bursts))
