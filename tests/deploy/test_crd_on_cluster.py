"""The CRD of NodeProfiles on a real API server: what it takes, and in which words it refuses the
rest. The CRD is that of the chart, in a group of its own."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.names import CONFIG_GROUP
from api.node_profile import NodeProfileObjectSpec
from api.strict import ConfigError, validated
from dra_driver.base.errors import NotFound, Refused
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from dra_driver.model.node_profiles import NodeFailure, ProfileCondition, ProfileStatus
from dra_driver.plan.profiles.objects import status_document
from dra_driver.plan.profiles.rules import decode_profile
from hack.testbed.cluster import Cluster
from tests.deploy.chart import GOLDEN, documents
from tests.deploy.installed import run
from tests.fakes.judged_profiles import OTHERWISE_SPELLED, RIGHT, WRONG, Entries
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

GROUP = "crd.test"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PROFILES = f"/apis/{GROUP}/v1beta1/nodeprofiles"
TIME = "2026-01-31T12:00:00Z"
JUDGE = {"dryRun": "All", "fieldValidation": "Strict"}

Document = dict[str, Any]


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[ApiClient]:
    """The API server, once it serves the CRD."""
    client = ApiClient(load_kubeconfig(cluster.kubeconfig))
    golden = GOLDEN.read_text().replace(f"nodeprofiles.{CONFIG_GROUP}", f"nodeprofiles.{GROUP}")
    [definition] = [
        document for document in documents(golden) if document["kind"] == "CustomResourceDefinition"
    ]
    definition["spec"]["group"] = GROUP
    client.create(DEFINITIONS, definition)
    try:
        eventually(lambda: is_served(client))
        yield client
    finally:
        client.delete(f"{DEFINITIONS}/nodeprofiles.{GROUP}")
        client.close()


def is_served(client: ApiClient) -> bool:
    try:
        client.list(PROFILES)
    except NotFound:
        return False
    return True


def profile(entries: Any, name: str = "judged", **fields: Any) -> Document:
    head = {"apiVersion": f"{GROUP}/v1beta1", "kind": "NodeProfile"}
    return {**head, "metadata": {"name": name}, "spec": {"gpus": entries, **fields}}


def taken(client: ApiClient, document: Document) -> Document:
    """*document* as the API server would keep it."""
    return client.create(PROFILES, document, JUDGE)


def refusal(client: ApiClient, document: Document) -> str:
    """What the API server says when it refuses *document*."""
    with pytest.raises(Refused) as refused:
        taken(client, document)
    return str(refused.value)


@pytest.mark.parametrize("entries", RIGHT.values(), ids=RIGHT)
def test_a_right_profile_is_kept_as_it_was_written(api: ApiClient, entries: Entries) -> None:
    assert taken(api, profile(entries))["spec"]["gpus"] == entries


@pytest.mark.parametrize(("entries", "place", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_profile_is_refused_with_its_path_and_the_remedy(
    api: ApiClient, entries: Entries, place: str, words: str
) -> None:
    message = refusal(api, profile(entries))

    assert f"spec.gpus{place}: " in message
    assert words in message


@pytest.mark.parametrize("entries", OTHERWISE_SPELLED.values(), ids=OTHERWISE_SPELLED)
def test_an_object_is_spelled_as_it_is_documented(api: ApiClient, entries: Entries) -> None:
    assert "spec.gpus[0]." in refusal(api, profile(entries))


def test_null_is_not_kept(api: ApiClient) -> None:
    entries = [{"replicas": None, "memory": {"least": None}, "mig": {"mode": "Off"}}]

    assert taken(api, profile(entries))["spec"]["gpus"] == [{"memory": {}, "mig": {"mode": "Off"}}]


def test_a_field_without_effect_is_refused_once(api: ApiClient) -> None:
    """Although more than one rule applies to it."""
    wrong = {"include": False, "rename": True, "shares": 2, "replicas": 3}
    message = refusal(api, profile([wrong | {"mig": {"profiles": ["a"]}}]))

    assert message.count("has no effect") == 4  # rename, shares, replicas, mig


SIZES = st.sampled_from(
    ("0", "1", "1Mi", "256Mi", "0.5Gi", "1e6", "1G", "128974848", "300.5Mi", "1Ti", "+1Gi", ".5Gi")
)
MIG = {
    "mode": st.sampled_from(["Dynamic", "Off", "Static"]),
    "profiles": st.lists(st.sampled_from(["1g.*", ""]), max_size=1),
    "layout": st.sampled_from(["all-balanced", "-a", "a.b_C"]),
    "strategy": st.sampled_from(["Mixed", "Single"]),
    "replicas": st.dictionaries(
        st.sampled_from(["1g.10gb", "1g.10gb+me", "1g.10gb+", "*"]), st.integers(0, 2), max_size=2
    ),
}
EFFECTS = st.sampled_from(["None", "NoSchedule", "NoExecute", "Evict"])
HEALTH = {
    "effects": st.dictionaries(st.sampled_from(["gpuLost", "xid", "fabric"]), EFFECTS),
    "xids": st.dictionaries(
        st.sampled_from(["31", "079", "79", "x", "99999"]), EFFECTS, max_size=2
    ),
    "recovery": st.sampled_from(["0s", "1m", "24h", "25h", "1d"]),
}
WORDS = st.sampled_from(["TimeSlicing", "MPS"])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "include": st.booleans(),
    "fractions": st.sampled_from(["Capacity", "Never", "Sometimes"]),
    "replicas": st.integers(0, 3) | st.just(1001),
    "rename": st.booleans(),
    "failRequestsGreaterThanOne": st.booleans(),
    "allocationPolicy": st.sampled_from(["Auto", "Packed", "Distributed", "Random"]),
    "strategies": st.lists(WORDS, max_size=2),
    "defaultStrategy": WORDS,
    "mpsTenants": st.sampled_from(["Any", "NonRoot", "UserNamespaces"]),
    "timeSliceInterval": st.sampled_from(["WholeGPUs", "Any"]),
    "mpsServer": st.sampled_from(["PerNamespace", "Shared"]),
    "shares": st.integers(0, 3),
    "memory": st.fixed_dictionaries({}, optional={"least": SIZES, "step": SIZES}),
    "memoryGuard": st.fixed_dictionaries(
        {},
        optional={
            "policy": st.sampled_from(["Off", "Warn", "Kill"]),
            "grace": st.sampled_from(["10s", "1h30m", "25h", "1.5h", "10", "86400s", "1d"]),
        },
    ),
    "memoryLimit": st.sampled_from(["BestEffort", "Strict"]),
    "mig": st.fixed_dictionaries({}, optional=MIG),
    "health": st.fixed_dictionaries({}, optional=HEALTH),
    "select": st.fixed_dictionaries(
        {},
        optional={
            "index": st.lists(st.integers(-1, 256), max_size=2),
            "uuid": st.lists(st.sampled_from(["GPU-1", "gpu-1", "GPU-"]), max_size=2),
            "product": st.lists(st.sampled_from(["*H100*", "", "L4"]), max_size=2),
        },
    ),
}
# Of many fields nearly always one is wrong.
ENTRY = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ENTRY, max_size=3))
def test_the_api_server_and_a_node_agree(api: ApiClient, entries: Entries) -> None:
    problems = problems_on_a_node(entries)
    if not problems:
        assert taken(api, profile(entries))["spec"]["gpus"] == entries
        return
    message = refusal(api, profile(entries))
    if not all("has no effect" in problem for problem in problems):
        return  # where a value is wrong by itself, not the same is said of others that depend on it
    assert message.count("has no effect") == len(problems)
    for problem in problems:
        place, _, words = problem.partition(": ")
        assert f"{place}: Invalid value" in message
        assert words in message


def problems_on_a_node(entries: Entries) -> tuple[str, ...]:
    head = {"apiVersion": f"{CONFIG_GROUP}/v1beta1", "kind": "NodeProfile"}
    try:
        decode_profile({**head, "spec": {"gpus": entries}}, "judged")
    except ConfigError as e:
        return e.problems
    return ()


def test_a_field_that_is_unknown_is_named_to_who_asks(api: ApiClient) -> None:
    """As kubectl does."""
    assert 'unknown field "spec.gpus[0].replica"' in refusal(api, profile([{"replica": 2}]))


def test_what_only_objects_say_has_its_defaults(api: ApiClient) -> None:
    spec = taken(api, profile([{}], nodeSelector={"cloud.test/pool": "gpu", "empty": ""}))["spec"]

    assert spec == {
        "gpus": [{}],
        "nodeSelector": {"cloud.test/pool": "gpu", "empty": ""},
        "priority": 0,
        "rollout": {
            "maxUnavailable": "10%",
            "maxFailures": 3,
            "progressDeadlineSeconds": 600,
            "paused": False,
        },
        "revisionHistoryLimit": 10,
    }
    read = validated(NodeProfileObjectSpec, spec)
    assert read.model_dump(by_alias=True, exclude_none=True) == spec


def test_a_profile_says_of_gpus_or_of_the_api(api: ApiClient) -> None:
    alone = {**profile([{}]), "spec": {"api": "DevicePlugin"}}
    nothing = {**alone, "spec": {"priority": 1}}

    assert "gpus" not in taken(api, alone)["spec"]
    assert "says nothing of GPUs; write gpus, or api" in refusal(api, nothing)


@pytest.mark.parametrize("word", ["Auto", "DRA", "DevicePlugin"])
def test_the_api_of_a_profile_is_one_of_three_words(api: ApiClient, word: str) -> None:
    assert taken(api, profile([{}], api=word))["spec"]["api"] == word
    assert f'spec.api: Unsupported value: "{word}s"' in refusal(api, profile([{}], api=f"{word}s"))


AT_ONCE = "is no number of nodes from 1 on, and no percentage; write for example 10%"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(
            ({"rollout": {"maxUnavailable": value}}, f"spec.rollout.maxUnavailable: {AT_ONCE}")
            for value in (0, 100_001, "0%", "101%", "10")
        ),
        ({"rollout": {"maxFailures": 0}}, "spec.rollout.maxFailures: "),
        ({"rollout": {"progressDeadlineSeconds": 0}}, "spec.rollout.progressDeadlineSeconds: "),
        ({"priority": 1_000_001}, "spec.priority: "),
        ({"revisionHistoryLimit": -1}, "spec.revisionHistoryLimit: "),
        (
            {"nodeSelector": {"a b": "c"}},
            "spec.nodeSelector: a key is no key that a node's label can have",
        ),
        (
            {"nodeSelector": {"a": "b c"}},
            "spec.nodeSelector[a]: is no value that a node's label can have",
        ),
    ],
    ids=str,
)
def test_wrong_fields_of_an_object_are_refused(
    api: ApiClient, fields: Mapping[str, Any], words: str
) -> None:
    place, _, otherwise = words.partition(": ")
    message = refusal(api, profile([{}], **fields))

    assert f"{place}: Invalid value" in message
    assert otherwise in message
    with pytest.raises(ConfigError):
        validated(NodeProfileObjectSpec, {"gpus": [{}], **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout": {"maxUnavailable": 1}},
        {"rollout": {"maxUnavailable": "100%", "paused": True}},
        {"priority": -1_000_000, "revisionHistoryLimit": 0},
    ],
    ids=str,
)
def test_right_fields_of_an_object_are_taken(api: ApiClient, fields: dict[str, Any]) -> None:
    spec = taken(api, profile([{}], **fields))["spec"]

    assert validated(NodeProfileObjectSpec, spec) == validated(
        NodeProfileObjectSpec, {"gpus": [{}], **fields}
    )


def test_a_profile_has_a_name_that_a_label_can_have(api: ApiClient) -> None:
    taken(api, profile([{}], "n" * 63))
    assert "metadata.name: has more than 63 characters" in refusal(api, profile([{}], "n" * 64))


def test_kubectl_shows_how_far_a_rollout_is_and_keeps_all_of_the_status(
    api: ApiClient, cluster: Cluster
) -> None:
    status = status_document(
        ProfileStatus(
            observed_generation=1,
            current_revision="shown-b",
            update_revision="shown-c",
            nodes=50,
            updated=12,
            pending=3,
            failed=1,
            updating=("node-1", "node-2"),
            failures=(NodeFailure("node-3", "is refused"),),
            conditions=(
                ProfileCondition("Complete", False, "RollingOut", "38 nodes wait", TIME, 1),
                ProfileCondition("Progressing", True, "RollingOut", "12 of 50 nodes", TIME, 1),
            ),
        )
    )
    created = api.create(PROFILES, profile([{}], "shown", priority=7))
    try:
        api.update(f"{PROFILES}/shown/status", {**created, "status": status})
        kept = api.get(f"{PROFILES}/shown")["status"]
        table = kubectl(cluster, "get", f"nodeprofiles.{GROUP}", "shown", "--output=wide")
    finally:
        api.delete(f"{PROFILES}/shown")

    assert kept == status
    heads, values = (line.split() for line in table.splitlines())
    assert heads == [
        *("NAME", "NODES", "UPDATED", "PENDING", "FAILED", "STATUS", "PRIORITY", "REVISION", "AGE")
    ]
    assert values[:-1] == ["shown", "50", "12", "3", "1", "RollingOut", "7", "shown-c"]


def kubectl(cluster: Cluster, *arguments: str) -> str:
    answer = run([str(cluster.kubectl), *arguments], cluster.kubeconfig)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
