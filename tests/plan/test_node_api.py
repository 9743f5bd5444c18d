"""By which API a node gives its GPUs out."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dra_driver.k8s.claims import Pod, PodUid
from dra_driver.k8s.pods import ContainerSpec, NodePod, PodDeletion, PodSpec
from dra_driver.kubeletplugin.device_plugin.resources import (
    AllocatedContainer,
    DeviceId,
    ResourceName,
)
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord, DeviceAllocation
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import (
    DEVICE_PLUGIN_USES,
    MOST_NAMED,
    DevicePluginHolders,
    DevicePluginUse,
)
from dra_driver.plan.node_api import (
    ApiChoice,
    ApiState,
    NodeApiFacts,
    api_condition,
    api_state,
    choose_api,
    device_plugin_holders,
    device_plugin_use,
    forgotten_pods,
    held_api,
    holder_names,
    kubelet_version,
    left_with_gpus,
    not_known_what_is_left,
    other_device_plugin,
    pods_without_devices,
    pods_without_gpus,
)
from dra_driver.plan.node_conditions import LONGEST_MESSAGE, NodeCondition, condition_of
from tests.builders import allocated_record, record

NAMES = ResourceNames()
AUTO, DRA, DEVICE_PLUGIN = AllocationApi.AUTO, AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN

NEW = NodeApiFacts(
    asked=AUTO,
    dra_served=True,
    kubelet=(1, 36),
    resource="nvidia.com/gpu",
    device_class="gpu.nvidia.com",
)

facts_of_any_node = st.builds(
    NodeApiFacts,
    asked=st.sampled_from([None, AUTO, DRA, DEVICE_PLUGIN]),
    dra_served=st.sampled_from([None, False, True]),
    kubelet=st.one_of(st.none(), st.tuples(st.just(1), st.integers(26, 37))),
    resource=st.sampled_from(["", "nvidia.com/gpu"]),
    device_class=st.sampled_from([None, "", "gpu.nvidia.com"]),
    serving=st.sampled_from([None, DRA, DEVICE_PLUGIN]),
    draining=st.booleans(),
    holder_names=st.sampled_from([None, (), ("default/train",)]),
    other_plugin=st.sampled_from(["", "another device plugin serves nvidia.com/gpu here"]),
)


@pytest.mark.parametrize(
    ("node", "api"),
    [
        (NEW, DRA),
        (replace(NEW, device_class=""), DEVICE_PLUGIN),
        (replace(NEW, kubelet=(1, 33)), DEVICE_PLUGIN),
        (replace(NEW, dra_served=False, kubelet=(1, 26)), DEVICE_PLUGIN),
        (replace(NEW, dra_served=False, kubelet=None, device_class=None), DEVICE_PLUGIN),
        (replace(NEW, resource="", device_class="", kubelet=(1, 32)), DRA),
        (replace(NEW, resource="", kubelet=(1, 31)), DEVICE_PLUGIN),
        (replace(NEW, asked=DEVICE_PLUGIN), DEVICE_PLUGIN),
        (replace(NEW, asked=DEVICE_PLUGIN, dra_served=None, kubelet=None), DEVICE_PLUGIN),
        (replace(NEW, asked=DRA, device_class="", kubelet=(1, 32)), DRA),
        (replace(NEW, asked=DRA, kubelet=(1, 28)), DEVICE_PLUGIN),
        (replace(NEW, asked=DRA, dra_served=False), DEVICE_PLUGIN),
    ],
)
def test_a_node_that_serves_nothing_yet_begins_with_what_is_wanted(
    node: NodeApiFacts, api: AllocationApi
) -> None:
    choice = choose_api(node)
    assert (choice.serving, choice.wanted, choice.offering) == (api, api, True)
    assert choice.why


@pytest.mark.parametrize(
    "unknown",
    [
        replace(NEW, asked=None),
        replace(NEW, dra_served=None),
        replace(NEW, kubelet=None),
        replace(NEW, device_class=None),
        replace(NEW, asked=DRA, dra_served=None),
    ],
)
@pytest.mark.parametrize("serving", [None, DRA, DEVICE_PLUGIN])
def test_what_is_not_known_changes_nothing(
    unknown: NodeApiFacts, serving: AllocationApi | None
) -> None:
    choice = choose_api(replace(unknown, serving=serving, draining=True))
    assert choice.serving is serving
    assert choice.offering is (serving is not None)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (replace(NEW, asked=DRA, dra_served=False), ("resource.k8s.io", "turn it on")),
        (replace(NEW, asked=DRA, kubelet=(1, 28)), ("kubelet is of 1.28", "1.32 or newer")),
    ],
)
def test_a_wish_that_cannot_be_followed_is_told_with_the_mend(
    node: NodeApiFacts, words: tuple[str, ...]
) -> None:
    problem = choose_api(node).problem
    assert all(word in problem for word in ("api: DRA", "spec.api", *words))


def test_a_node_changes_in_two_steps_once_no_pod_holds_a_gpu() -> None:
    node = replace(NEW, serving=DEVICE_PLUGIN, holder_names=("default/train",))
    waiting = choose_api(node)
    assert (waiting.serving, waiting.offering) == (DEVICE_PLUGIN, True)
    assert (waiting.wanted, waiting.waits_for) == (DRA, ("default/train",))

    draining = choose_api(replace(node, holder_names=()))
    assert (draining.serving, draining.offering) == (DEVICE_PLUGIN, False)
    assert api_state(draining, DEVICE_PLUGIN) is ApiState.DRAINING
    assert api_state(draining, DRA) is ApiState.OFF

    changed = choose_api(replace(node, holder_names=(), draining=True))
    assert (changed.serving, changed.offering, changed.waits_for) == (DRA, True, ())
    assert api_state(changed, DRA) is ApiState.ON
    assert api_state(changed, DEVICE_PLUGIN) is ApiState.OFF


def test_where_nobody_tells_who_holds_gpus_that_is_what_the_node_waits_for() -> None:
    choice = choose_api(replace(NEW, serving=DEVICE_PLUGIN, holder_names=None))
    assert (choice.serving, choice.offering) == (DEVICE_PLUGIN, True)
    assert choice.waits_for == ("an answer to who holds GPUs",)


def test_a_pod_that_came_while_the_node_was_about_to_change_takes_it_back() -> None:
    node = replace(NEW, serving=DEVICE_PLUGIN, holder_names=("default/late",), draining=True)
    choice = choose_api(node)
    assert (choice.serving, choice.offering) == (DEVICE_PLUGIN, True)
    assert choice.waits_for == ("default/late",)


def test_nothing_is_given_out_by_dra_where_it_went_while_pods_still_have_gpus() -> None:
    node = replace(NEW, dra_served=False, serving=DRA, holder_names=("default/train",))
    choice = choose_api(node)
    assert (choice.serving, choice.offering) == (DRA, False)
    assert (choice.wanted, choice.waits_for) == (DEVICE_PLUGIN, ("default/train",))


@given(facts_of_any_node)
def test_a_node_never_changes_while_something_is_held(facts: NodeApiFacts) -> None:
    choice = choose_api(replace(facts, holder_names=facts.holder_names or ("default/train",)))
    if facts.serving is not None:
        assert choice.serving is facts.serving


@given(facts_of_any_node)
def test_no_node_goes_to_dra_that_cannot_serve_it(facts: NodeApiFacts) -> None:
    choice = choose_api(facts)
    if choice.serving is DRA and facts.serving is not DRA:
        assert facts.dra_served
        assert facts.kubelet is not None and facts.kubelet >= (1, 32)


@given(facts_of_any_node)
def test_what_the_profile_says_is_wanted_or_told_to_be_impossible(facts: NodeApiFacts) -> None:
    choice = choose_api(facts)
    if facts.asked in (DRA, DEVICE_PLUGIN) and facts.dra_served is not None and facts.kubelet:
        assert choice.wanted is facts.asked or "spec.api" in choice.problem


@given(facts_of_any_node)
def test_nothing_is_offered_beside_another_device_plugin(facts: NodeApiFacts) -> None:
    choice = choose_api(facts)
    if facts.other_plugin:
        assert not choice.offering
        assert choice.other_plugin == facts.other_plugin


@given(facts_of_any_node)
def test_a_choice_is_the_same_again_once_it_was_made(facts: NodeApiFacts) -> None:
    choice = choose_api(facts)
    if choice.serving is choice.wanted:
        again = choose_api(replace(facts, serving=choice.serving, draining=False))
        assert (again.serving, again.offering) == (choice.serving, choice.offering)


@given(facts_of_any_node)
def test_one_api_at_most_is_on(facts: NodeApiFacts) -> None:
    choice: ApiChoice = choose_api(facts)
    states = [api_state(choice, api) for api in (DRA, DEVICE_PLUGIN)]
    assert len([state for state in states if state is not ApiState.OFF]) <= 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v1.26.13", (1, 26)),
        ("v1.34.1-gke.5", (1, 34)),
        ("v1.30.2+k3s1", (1, 30)),
        ("1.36.3", (1, 36)),
        ("", None),
        ("unknown", None),
    ],
)
def test_the_kubelets_version_is_read_as_distributions_write_it(
    text: str, version: tuple[int, int] | None
) -> None:
    assert kubelet_version(text) == version


def test_who_holds_something_is_told_by_api_and_once() -> None:
    records = [
        record("a", pods=("train", "other")),
        record("b", pods=("train",)),
        record("c"),
        allocated_record("GPU-1", pods=("old",)),
        allocated_record("GPU-2", "GPU-3"),
    ]
    assert holder_names(records, DRA) == (
        "claim default/c",
        "pod default/other",
        "pod default/train",
    )
    assert holder_names(records, DEVICE_PLUGIN) == (
        "a container with nvidia.com/gpu (GPU-2, GPU-3)",
        "pod default/old",
    )


def test_who_has_gpus_by_the_device_plugin_api_is_counted_and_named_as_far_as_it_is_known() -> None:
    records = [
        record("by-a-claim", pods=("other",)),
        held_in("ml", 1, "train"),
        held_in("", 2, "of-which-the-api-server-tells-nothing"),
        held_in("ml", 3),
    ]

    holders = device_plugin_holders(records, damaged=2)

    assert holders.pods == ("ml/train",)
    assert holders.count == 5


def test_what_is_held_tells_by_which_api_it_was_given_out() -> None:
    assert held_api([], []) is None
    assert held_api([record("a")], []) is DRA
    assert held_api([allocated_record("GPU-1")], []) is DEVICE_PLUGIN
    given = [DeviceAllocation(ResourceName("nvidia.com/gpu"), (DeviceId("GPU-1"),))]
    assert held_api([], given) is DEVICE_PLUGIN
    assert held_api([record("a")], given) is DRA, "pods that have ended are among those with them"


def test_another_device_plugin_is_named_by_its_sockets_or_by_what_it_serves() -> None:
    assert other_device_plugin((), (), {}) == ""
    by_socket = other_device_plugin(("/d/nvidia-gpu.sock",), ("nvidia.com/gpu",), {})
    assert "(/d/nvidia-gpu.sock)" in by_socket
    by_resource = other_device_plugin((), ("nvidia.com/gpu",), {})
    assert "nvidia.com/gpu is allocatable on the Node" in by_resource
    by_device = other_device_plugin((), (), {ResourceName("nvidia.com/gpu"): DeviceId("vgpu-1")})
    assert "(the kubelet has the device vgpu-1 of nvidia.com/gpu)" in by_device
    assert all("remove it from this node" in text for text in (by_socket, by_resource, by_device))


def test_the_node_says_by_which_api_it_gives_gpus_out_and_why() -> None:
    assert api_condition(ApiChoice(why="the profile is not known")) is None
    served = choose_api(NEW)
    because = "DeviceClass gpu.nvidia.com maps nvidia.com/gpu"
    assert api_condition(served) == NodeCondition("True", "DRA", because)
    refused = choose_api(replace(NEW, asked=DRA, kubelet=(1, 28)))
    condition = api_condition(refused)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", "DevicePlugin")
    assert "the profile says api: DRA, but" in condition.message


def test_the_node_says_what_it_waits_for_and_when_it_changes() -> None:
    node = replace(NEW, serving=DEVICE_PLUGIN, holder_names=("pod default/train",))
    because = "DRA is to come: DeviceClass gpu.nvidia.com maps nvidia.com/gpu"
    assert api_condition(choose_api(node)) == NodeCondition(
        "True", "DevicePlugin", f"{because}; waits for pod default/train"
    )
    assert api_condition(choose_api(replace(node, holder_names=()))) == NodeCondition(
        "False", "DevicePlugin", f"{because}; nothing is given out meanwhile"
    )


def test_the_pods_that_another_device_plugin_has_left_are_named_as_far_as_there_is_room() -> None:
    assert not_known_what_is_left("why").endswith("gone: why")
    assert left_with_gpus(("pod a/b", "pod c/d")).endswith("have ended: pod a/b, pod c/d")
    many = left_with_gpus([f"pod ml/{number:060}" for number in range(100)])
    assert " more" in many
    assert len(many) < LONGEST_MESSAGE
    assert left_with_gpus(["x" * 5000]).endswith("1 pods")


def test_a_condition_of_a_node_is_found_by_its_type() -> None:
    ready, api = {"type": "Ready"}, {"type": "GPUsAllocatedBy", "reason": "DRA"}
    node = {"status": {"conditions": [ready, api]}}
    assert condition_of(node, "GPUsAllocatedBy") == api
    assert condition_of(node, "Other") == condition_of({}, "Ready") == {}


def test_the_node_names_another_device_plugin() -> None:
    choice = choose_api(replace(NEW, other_plugin="another device plugin is here"))
    assert api_condition(choice) == NodeCondition(
        "False", "OtherDevicePlugin", "another device plugin is here"
    )


def resources() -> st.SearchStrategy[str]:
    """Names of resources, up to the longest; empty: none is offered."""
    domains, ends = st.text("a.", min_size=1, max_size=253), st.text("b-", min_size=1, max_size=63)
    return st.one_of(st.just(""), st.builds("{}/{}".format, domains, ends))


names_of_resources = st.builds(ResourceNames, resources(), resources(), resources())


@given(
    st.lists(st.text("abc-/", min_size=1, max_size=253), max_size=200),
    st.text("x ", max_size=3000),
    st.text("y ", max_size=3000),
    st.text("z ", max_size=3000),
)
def test_whoever_the_node_waits_for_the_condition_is_bounded(
    pods: list[str], why: str, problem: str, other_plugin: str
) -> None:
    wanted_apis, plugins = (DRA, DEVICE_PLUGIN), ("", other_plugin)
    for waits_for, wanted, plugin in product(((), tuple(pods)), wanted_apis, plugins):
        choice = ApiChoice(DRA, True, wanted, why, waits_for, problem, plugin)
        condition = api_condition(choice)
        assert condition is not None
        assert len(condition.message) <= LONGEST_MESSAGE


def test_where_pods_get_gpus_by_the_device_plugin_api_the_node_says_what_they_ask_for() -> None:
    choice = ApiChoice(DEVICE_PLUGIN, True, DEVICE_PLUGIN)
    assert device_plugin_use(choice, NAMES) == DevicePluginUse(NAMES, None)
    beside = replace(
        choice, other_plugin="another one", holders=DevicePluginHolders(("ml/train",), 1)
    )
    assert device_plugin_use(beside, NAMES) == DevicePluginUse(NAMES, beside.holders)
    assert device_plugin_use(replace(beside, serving=DRA), NAMES) is not None
    assert device_plugin_use(ApiChoice(DRA, True, DRA), NAMES) is None


LONGEST_POD, LONGEST_NAMESPACE = "p" * 249, "n" * 63


def held_in(namespace: str, n: int, *pods: str) -> ClaimRecord:
    """The GPU of number *n*, by *pods* of that namespace."""
    held = allocated_record(f"GPU-{n}", pods=pods)
    return replace(held, claim=replace(held.claim, namespace=namespace))


@given(
    names_of_resources,
    st.integers(0, 600),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 5),
)
@example(ResourceNames(*(f"{'a' * 253}/{'b' * 63}" for _ in range(3))), 600, 0, 0, 0)
@example(ResourceNames(), 0, 1, 0, 0)
def test_however_many_pods_have_gpus_what_commands_read_counts_all_in_8_kib(
    names: ResourceNames, pods: int, untold: int, unknown: int, damaged: int
) -> None:
    """*untold*: pods of which the API server does not tell."""
    known = [held_in(LONGEST_NAMESPACE, n, f"{LONGEST_POD}{n:04}") for n in range(pods)]
    known += [held_in("", n, f"6f1d1a52-{n:04}") for n in range(untold)]
    without_pods = [held_in("", n) for n in range(unknown)]
    holders = device_plugin_holders([record("by-a-claim"), *without_pods, *known], damaged)
    choice = ApiChoice(DEVICE_PLUGIN, False, DEVICE_PLUGIN, other_plugin="x", holders=holders)
    use = device_plugin_use(choice, names)

    assert use is not None
    text = DEVICE_PLUGIN_USES.encode(use)
    assert len(text) <= 8192
    assert DEVICE_PLUGIN_USES.decode(text) == use
    assert holders.problem == ""
    assert holders.count == pods + untold + unknown + damaged
    first = range(min(pods, MOST_NAMED))
    assert holders.pods == tuple(f"{LONGEST_NAMESPACE}/{LONGEST_POD}{n:04}" for n in first)


def node_pod(
    name: str,
    *asks_for: str,
    ended: bool = False,
    extended_claim: bool = False,
    acknowledged: bool = True,
    deletion: PodDeletion | None = None,
) -> NodePod:
    uid = PodUid(f"uid-{name}")
    container = ContainerSpec("main", frozenset(), root=False, asks_for=frozenset(asks_for))
    spec = PodSpec(
        "team-a", name, uid, (container,), deletion=deletion, extended_claim=extended_claim
    )
    return NodePod("team-a", Pod(name, uid), ended, spec, acknowledged)


def test_a_pod_that_asks_by_name_and_has_no_claim_got_no_gpu() -> None:
    pods = (
        node_pod("whole", "nvidia.com/gpu"),
        node_pod("partition", "cpu", "nvidia.com/mig-1g.10gb"),
        node_pod("scheduled", "nvidia.com/gpu", extended_claim=True),
        node_pod("ended", "nvidia.com/gpu", ended=True),
        node_pod("other", "example.com/gpu"),
    )

    without = pods_without_gpus(pods, ResourceNames())

    assert [pod.pod.name for pod in without] == ["whole", "partition"]


def having(name: str, resource: str) -> AllocatedContainer:
    ids = (DeviceId("GPU-1"),)
    return AllocatedContainer(PodUid(f"uid-{name}"), "main", ResourceName(resource), ids)


def test_a_pod_to_which_the_kubelet_gave_nothing_of_a_resource_that_it_asks_for_got_no_gpu() -> (
    None
):
    pods = (
        node_pod("early", "nvidia.com/gpu"),
        node_pod("half", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"),
        node_pod("well", "nvidia.com/gpu", "cpu"),
        node_pod("coming", "nvidia.com/gpu", acknowledged=False),
        node_pod("claimed", "nvidia.com/gpu", extended_claim=True),
        node_pod("ended", "nvidia.com/gpu", ended=True),
        node_pod("other", "example.com/gpu"),
        node_pod("forgotten", "nvidia.com/gpu"),
    )
    containers = (
        having("half", "nvidia.com/gpu"),
        having("well", "nvidia.com/gpu"),
        having("early", "example.com/gpu"),
    )
    records = [replace(allocated_record("GPU-1"), pods=(pods[-1].pod,))]

    without = pods_without_devices(pods, containers, records, ResourceNames())

    assert [pod.pod.name for pod in without] == ["early", "half"]


def test_a_pod_with_a_record_of_whose_devices_the_kubelet_knows_nothing_is_forgotten_by_it() -> (
    None
):
    pods = (
        node_pod("forgotten", "nvidia.com/gpu"),
        node_pod("half", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"),
        node_pod("well", "nvidia.com/gpu"),
        node_pod("ended", "nvidia.com/gpu", ended=True),
        node_pod("going", "nvidia.com/gpu", deletion=PodDeletion(100.0, 30.0)),
        node_pod("claimed"),
        node_pod("early", "nvidia.com/gpu"),
    )
    *of_allocations, claimed, _ = pods
    partition = allocated_record("MIG-1", resource="nvidia.com/mig-1g.10gb", pods=[pods[1].pod])
    whole = allocated_record("GPU-1", pods=[pod.pod for pod in of_allocations])
    records = [whole, partition, record("by-a-claim", pods=[claimed.pod])]
    containers = (having("well", "nvidia.com/gpu"), having("half", "nvidia.com/gpu"))

    forgotten = forgotten_pods(pods, containers, records)

    assert [pod.pod.name for pod in forgotten] == ["forgotten", "half"]


@pytest.mark.parametrize(
    ("holders", "problem"),
    [
        pytest.param(DevicePluginHolders(), "", id="nobody"),
        pytest.param(DevicePluginHolders(("ml/train", "ml/web.0"), 2), "", id="all named"),
        pytest.param(DevicePluginHolders(("ml/train",), 500), "", id="some named"),
        pytest.param(DevicePluginHolders((), -1), "count", id="less than none"),
        pytest.param(DevicePluginHolders(("ml/a", "ml/b"), 1), "count", id="fewer than named"),
        pytest.param(DevicePluginHolders((), 10**20), "count", id="more than there are devices"),
        pytest.param(DevicePluginHolders(("train",), 1), "pods", id="without a namespace"),
        pytest.param(DevicePluginHolders(("ml/train\nnode-b",), 1), "pods", id="two lines"),
    ],
)
def test_what_the_driver_has_not_written_of_holders_is_a_problem_with_its_field(holders, problem):
    assert holders.problem.startswith(f"`holders.{problem}`" if problem else "")
    assert bool(holders.problem) is bool(problem)
