"""``doctor``'s checks of the health of GPUs: what is wrong with them, since when, and what to do.

Of this node the record of its plugin is read, which has problems without a taint, too; of other
nodes the taints of their slices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

from dra_driver.base.frozen import ordered
from dra_driver.cli.doctor.scheduling.published_devices import PublishedDevice, PublishedDevices
from dra_driver.cli.findings import Check, Finding, abbreviated, ok, warn
from dra_driver.model.gpus import Inventory
from dra_driver.model.health import DEFAULT_HEALTH_RULES, Effect, Fault, HealthState, Problem
from dra_driver.model.profiles import DEFAULT_PROFILE, AllocationApi
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.health_file import HealthFile
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.health.messages import action, describe_problem, meaning
from dra_driver.plan.health.problems import effect_of, problem_of
from dra_driver.plan.health.state import RulesByGpu
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.settings import DoctorSettings

GPU_HEALTH, TAINTED_DEVICES = "GPU health", "tainted devices"


@ordered
class _NodeTaint:
    """A taint that devices of one node have."""

    node: str
    problem: Problem
    value: str
    effect: str
    since: str  # as the API server has it


def checks(settings: DoctorSettings, node: GpuNode) -> list[Check]:
    file = HealthFile(settings.health_state, boot_id(settings.host_root))
    served = ServedApiFile(settings.served_api)
    check = partial(
        check_gpu_health,
        file.inspect,
        node.inventory,
        partial(_rules, settings),
        served.inspect,
    )
    return [(GPU_HEALTH, check)]


def _rules(settings: DoctorSettings, inventory: Inventory) -> RulesByGpu:
    """By the profile in force."""
    profile = LastProfileFile(settings.last_profile).read() or DEFAULT_PROFILE
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    return {gpu: each.health for gpu, each in rules.items()}


def check_gpu_health(
    read_health: Callable[[], HealthState],
    read_inventory: Callable[[], Inventory],
    read_rules: Callable[[Inventory], RulesByGpu],
    read_served: Callable[[], ServedApi | None],
) -> Iterator[Finding]:
    """One finding for each fault of the GPUs of this node."""
    state = read_health()
    if not state.faults:
        yield ok(GPU_HEALTH, "nothing is wrong with a GPU, as far as the plugin has seen")
        return
    inventory = read_inventory()
    gpu_names = {gpu.uuid: gpu.name for gpu in inventory.gpus}
    rules = read_rules(inventory)
    served = read_served()
    by_device_plugin = served is not None and served.api is AllocationApi.DEVICE_PLUGIN
    places = {gpu.uuid: place for place, gpu in enumerate(inventory.gpus)}
    for fault in sorted(state.faults, key=lambda fault: places.get(fault.gpu, len(places))):
        gpu_rules = rules.get(fault.gpu, DEFAULT_HEALTH_RULES)
        effect = effect_of(fault.problem, fault.value, gpu_rules)
        over = fault.well_since is not None
        consequence = _for_the_kubelet(effect, over) if by_device_plugin else _taint(effect, over)
        yield _fault_finding(fault, gpu_names.get(fault.gpu, fault.gpu), consequence)


def _taint(effect: Effect, over: bool) -> str:
    if effect is Effect.NONE:
        return "no taint" + ("; it is over" if over else "")
    return f"a taint {effect}" + (", which goes soon: it is over" if over else "")


def _for_the_kubelet(effect: Effect, over: bool) -> str:
    """The device-plugin API has no taints. It lists a GPU as unhealthy as long as any of its faults
    has an effect: a single fault does not tell how the GPU is listed."""
    if effect is Effect.NONE:
        return "does not make it unhealthy" + ("; it is over" if over else "")
    unhealthy = "makes it unhealthy (no new pod gets it)"
    return unhealthy + (", but not for long: it is over" if over else "")


def _fault_finding(fault: Fault, gpu_name: str, consequence: str) -> Finding:
    return warn(
        GPU_HEALTH,
        f"{gpu_name}: {describe_problem(fault)}; {consequence}",
        action(fault.problem, fault.value),
    )


def check_tainted_devices(
    own_node: str, read_published: Callable[[], PublishedDevices]
) -> Iterator[Finding]:
    """One finding for each taint of the devices of a node other than *own_node*. Forbidden: this
    account may not read slices."""
    devices_by_taint: dict[_NodeTaint, list[str]] = defaultdict(list)
    for device in read_published().devices:
        if device.node != own_node:
            for taint in _health_taints(device):
                devices_by_taint[taint].append(device.name)
    for node_taint, names in sorted(devices_by_taint.items()):
        yield _taint_finding(node_taint, names)
    if not devices_by_taint:
        yield ok(TAINTED_DEVICES, "no other node has a device with a taint for its health")


def _health_taints(device: PublishedDevice) -> Iterator[_NodeTaint]:
    for taint in device.document.get("taints") or ():
        if problem := problem_of(str(taint["key"])):
            value, effect, since = (
                str(taint.get(name) or "") for name in ("value", "effect", "timeAdded")
            )
            yield _NodeTaint(device.node, problem, value, effect, since)


def _taint_finding(taint: _NodeTaint, names: list[str]) -> Finding:
    return warn(
        TAINTED_DEVICES,
        f"{abbreviated(names)} on {taint.node}: {meaning(taint.problem, taint.value)}, "
        f"since {taint.since}; a taint {taint.effect}",
        action(taint.problem, taint.value),
    )
