"""How often everything is measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    starts: int  # of the plugin
    rounds: int  # of singles, then bursts
    singles: int  # claims one after another, a round
    bursts: int  # of eight claims at once, a round
    held: int  # claims already prepared
    held_rounds: int
    changes: int  # of the CDI directory, while claims are held there
    idle_seconds: float
    pods: int  # of each kind
    configs: int  # of each shape


FULL = Sizes(7, 5, 24, 8, 500, 3, 10, 60.0, 12, 10)
QUICK = Sizes(3, 2, 15, 4, 500, 1, 3, 10.0, 4, 5)


FULL_DEVICE_PLUGIN_PODS, QUICK_DEVICE_PLUGIN_PODS = 24, 6  # of each kind


@dataclass(frozen=True, slots=True)
class FleetSizes:
    nodes: int  # of eight GPUs
    partitioned_nodes: int  # of these, whose GPUs are offered in partitions where any are
    rounds: int  # of one burst of each shape
    limited_pods: int  # a burst, with the scheduler's default client limits
    lifted_pods: int  # without
    partitioned_pods: int  # with partitions


FULL_FLEET = FleetSizes(200, 20, 4, 200, 400, 200)
QUICK_FLEET = FleetSizes(200, 20, 2, 200, 200, 96)


@dataclass(frozen=True, slots=True)
class ControllerSizes:
    nodes: int  # shared evenly by the profiles
    profiles: int
    claims: int
    samples: int  # of each kind of change


FULL_CONTROLLER = ControllerSizes(5000, 20, 20000, 40)
QUICK_CONTROLLER = ControllerSizes(500, 20, 1000, 20)
