"""What our shape of a GPU costs the scheduler, in turns with one plain device a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from hack.benchmark.bursts import GPU, WHOLE, Burst, Bursts, Mix
from hack.benchmark.figures import Measured, Results
from hack.benchmark.fleet_nodes import Fleet, Shape, nodes
from hack.benchmark.fleet_nvidia import nvidia_partitioned
from hack.benchmark.fleet_shapes import ours, ours_partitioned, plain
from hack.benchmark.sizes import FleetSizes
from hack.testbed.components import Flags
from hack.testbed.control_plane import ControlPlane, control_plane

Progress = Callable[[str], None]

_WARM_UP = 16  # pods
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


@dataclass(frozen=True, slots=True)
class Case:
    """What is published, and what the pods of a burst claim."""

    shape: Shape
    mix: Mix


# A quarter of the pods want partitions, which a tenth of the nodes have. NVIDIA's driver publishes
# every profile, ours by default one of each size; these are of both.
PARTITIONS: Mix = {GPU: 6, "1g.10gb": 1, "3g.40gb": 1}
_CASES = {"pods_per_second": Case(ours, WHOLE), "plain_pods_per_second": Case(plain, WHOLE)}
_PARTITIONED = {
    "mig_pods_per_second": Case(ours_partitioned, PARTITIONS),
    "mig_nvidia_shape_pods_per_second": Case(nvidia_partitioned, PARTITIONS),
    "mig_plain_pods_per_second": Case(plain, WHOLE),
}


def measure(version: str, sizes: FleetSizes, progress: Progress) -> Results:
    """All figures: with the scheduler's default client limits, then without limits, and then with
    partitions."""
    with control_plane(version, _FLAGS, progress) as plane:
        api = ApiClient(
            load_kubeconfig(plane.kubeconfig), ApiTimeouts(read=_READ_SECONDS, write=_READ_SECONDS)
        )
        fleet = Fleet(api, nodes(sizes.nodes, sizes.partitioned_nodes))
        bursts = Bursts(api, (WHOLE, PARTITIONS))
        course = Course(plane, fleet, bursts, progress)
        limited = course.run(_CASES, sizes.limited_pods, sizes.rounds)
        plane.restart("scheduler", {"scheduler": _LIFTED})
        lifted = course.run(_CASES, sizes.lifted_pods, sizes.rounds)
        partitioned = course.run(_PARTITIONED, sizes.partitioned_pods, sizes.rounds)
        api.close()
    results = {f"fleet_{name}": measured for name, measured in (limited | partitioned).items()}
    return results | {f"fleet_unthrottled_{name}": measured for name, measured in lifted.items()}


class Course:
    """Rounds of bursts, each case once a round."""

    def __init__(
        self, plane: ControlPlane, fleet: Fleet, bursts: Bursts, progress: Progress
    ) -> None:
        self._control_plane = plane
        self._fleet = fleet
        self._bursts = bursts
        self._progress = progress

    def run(self, cases: Mapping[str, Case], pods: int, rounds: int) -> dict[str, Measured]:
        """The median of *rounds* for each of *cases*; another one is first each time."""
        bursts: dict[str, list[Burst]] = {name: [] for name in cases}
        for turn in range(rounds):
            for name in list(cases)[:: -1 if turn % 2 else 1]:
                burst = self._burst(cases[name], pods)
                bursts[name].append(burst)
                self._progress(
                    f"round {turn + 1}: {name} {burst.pods_per_second:.1f}, "
                    f"{burst.cpu_ms:.1f} ms of the scheduler's processor time a pod"
                )
        return {name: _measured(each) for name, each in bursts.items()}

    def _burst(self, case: Case, pods: int) -> Burst:
        self._fleet.publish(case.shape)
        # Some pods before: the scheduler has seen the slices, and the classes' CEL is compiled.
        self._bursts.burst(case.mix, _WARM_UP, self._control_plane.pid("scheduler"))
        return self._bursts.burst(case.mix, pods, self._control_plane.pid("scheduler"))


def _measured(bursts: Sequence[Burst]) -> Measured:
    each = " ".join(f"{burst.pods_per_second:.1f}" for burst in bursts)
    spent = median(burst.cpu_ms for burst in bursts)
    where = f"rounds {each}; {spent:.1f} ms of the scheduler's processor time a pod"
    return Measured(median(burst.pods_per_second for burst in bursts), where, len(bursts))
