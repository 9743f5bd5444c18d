"""The examples: complete, in the driver's names, with sentences that a test can follow."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api import names
from api.claim_configs import decode_config
from dra_driver.plan.mig.manager.layouts import decode_layouts
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.revisions import decode_rules
from dra_driver.plan.profiles.rules import decode_profile
from dra_driver.sim.node_spec import node_file
from tests.deploy.chart import GOLDEN, REPOSITORY, objects
from tests.deploy.examples import (
    EXAMPLES,
    IMAGES,
    Compares,
    Contains,
    Events,
    Example,
    Expectation,
    Log,
    ShowsCount,
    Uses,
    examples,
    expectation,
    read,
    wrong,
)

ALL = [pytest.param(example, id=example.name) for example in examples()]
ATTRIBUTES = {
    value
    for name, value in vars(names).items()
    if name.isupper()
    and isinstance(value, str)
    and name not in {"DRIVER", "CONFIG_GROUP", "CONFIG_VERSION"}
    and not name.startswith(("TYPE_", "CDI_"))
}
CLASSES = {
    name: each
    for name, each in objects(GOLDEN.read_text()).items()
    if each["kind"] == "DeviceClass"
}
FIRST = "GPU-11111111-1111-1111-1111-111111111111"
SECOND = "GPU-22222222-2222-2222-2222-222222222222"
PARTITION = "MIG-33333333-3333-3333-3333-333333333333"


def of_kind(example: Example, *kinds: str) -> list[dict[str, Any]]:
    return [document for document in example.objects() if document["kind"] in kinds]


def claims(example: Example) -> dict[tuple[str, str, str], dict[str, Any]]:
    """``devices`` of every claim and template, by kind, namespace and name."""
    devices = {}
    for document in of_kind(example, "ResourceClaim", "ResourceClaimTemplate"):
        spec = document["spec"]
        key = (document["kind"], document["metadata"]["namespace"], document["metadata"]["name"])
        devices[key] = spec.get("spec", spec)["devices"]
    return devices


def requested(devices: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything that names a class: requests, or their alternatives."""
    for request in devices["requests"]:
        yield from request.get("firstAvailable") or [request["exactly"]]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def mounted(example: Example, pod: dict[str, Any]) -> Iterator[str]:
    """The text of the files that the pod gets from the example's ConfigMaps."""
    names = [v["configMap"]["name"] for v in pod["spec"].get("volumes", []) if "configMap" in v]
    for document in of_kind(example, "ConfigMap"):
        if document["metadata"]["name"] in names:
            yield from document["data"].values()


def plain(name: str) -> str:
    """An attribute as ``api.names`` writes it: without the driver's own domain."""
    return name.removeprefix(f"{names.DRIVER}/")


@pytest.mark.parametrize("example", ALL)
def test_an_example_is_complete_in_namespaces_of_its_own(example: Example) -> None:
    spaces = {document["metadata"]["name"] for document in of_kind(example, "Namespace")}
    assert example.name in spaces
    assert all(space.startswith(example.name) for space in spaces)
    for document in example.objects():
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] in spaces
    assert (EXAMPLES / example.name / "README.md").is_file()


@pytest.mark.parametrize("example", ALL)
def test_api_versions_are_the_stable_ones(example: Example) -> None:
    expected = {"Namespace": "v1", "Pod": "v1", "ConfigMap": "v1", "StatefulSet": "apps/v1"}
    for document in example.objects():
        version = expected.get(document["kind"], "resource.k8s.io/v1")
        assert document["apiVersion"] == version


@pytest.mark.parametrize("example", ALL)
def test_claims_ask_for_classes_that_the_chart_installs(example: Example) -> None:
    for devices in claims(example).values():
        assert {request["deviceClassName"] for request in requested(devices)} <= CLASSES.keys()


@pytest.mark.parametrize("example", ALL)
def test_selectors_and_constraints_use_names_that_the_driver_publishes(example: Example) -> None:
    for devices in claims(example).values():
        selectors = [s for request in requested(devices) for s in request.get("selectors", [])]
        for selector in selectors:
            expression = selector["cel"]["expression"]
            used = re.findall(r"device\.(?:attributes|capacity)\['([^']+)'\]\.(\w+)", expression)
            assert used, expression
            for domain, name in used:
                assert plain(f"{domain}/{name}") in ATTRIBUTES
        for constraint in devices.get("constraints", []):
            assert plain(constraint["matchAttribute"]) in ATTRIBUTES
            assert set(constraint["requests"]) <= {r["name"] for r in devices["requests"]}


@pytest.mark.parametrize("example", ALL)
def test_every_configuration_is_one_that_the_driver_understands(example: Example) -> None:
    for devices in claims(example).values():
        for entry in devices.get("config", []):
            assert entry["opaque"]["driver"] == names.DRIVER
            decode_config(entry["opaque"]["parameters"])


@pytest.mark.parametrize("example", ALL)
def test_pods_name_claims_and_requests_that_exist_and_every_claim_is_used(example: Example) -> None:
    known, used = claims(example), set()
    for pod in example.pods():
        by_name = {}
        for entry in pod["spec"].get("resourceClaims", []):
            template = entry.get("resourceClaimTemplateName")
            kind = "ResourceClaimTemplate" if template else "ResourceClaim"
            name = template or entry["resourceClaimName"]
            by_name[entry["name"]] = key = (kind, pod["metadata"]["namespace"], name)
            used.add(key)
        for container in containers(pod):
            for entry in container["resources"].get("claims", []):
                requests = {r["name"] for r in known[by_name[entry["name"]]]["requests"]}
                assert {entry["request"]} <= requests if "request" in entry else requests
    assert used == known.keys()


@pytest.mark.parametrize("example", ALL)
def test_every_container_asks_for_a_gpu_and_lists_it(example: Example) -> None:
    named = {each["spec"].get("extendedResourceName") for each in CLASSES.values()}
    for pod in example.pods():
        for container in containers(pod):
            resources = container["resources"]
            assert resources.get("claims") or resources["limits"].keys() <= named
            assert "nvidia-smi -L" in " ".join([*container["command"], *mounted(example, pod)])
            assert container["image"] in IMAGES


@pytest.mark.parametrize("example", ALL)
def test_admin_access_is_asked_for_in_labelled_namespaces_only(example: Example) -> None:
    labelled = {
        document["metadata"]["name"]
        for document in of_kind(example, "Namespace")
        if document["metadata"].get("labels", {}).get("resource.kubernetes.io/admin-access")
    }
    asking = {
        space
        for (_, space, _), devices in claims(example).items()
        if any(request.get("adminAccess") for request in requested(devices))
    }
    assert asking == labelled


@pytest.mark.parametrize("example", ALL)
def test_the_comment_expects_something_of_every_pod_and_container(example: Example) -> None:
    pods = {(p["metadata"]["namespace"], p["metadata"]["name"]): p for p in example.pods()}
    assert {(e.namespace, e.pod) for e in example.expectations} == pods.keys()
    looked_at: set[Log] = set()
    for check in (check for e in example.expectations for check in e.checks):
        looked_at |= {check.log} if isinstance(check.log, Log) else set()
        looked_at |= {check.second} if isinstance(check, Compares) else set()
    listed = {
        Log(*where, container["name"] if len(containers(pod)) > 1 else None)
        for where, pod in pods.items()
        for container in containers(pod)
    }
    assert looked_at == listed


@pytest.mark.parametrize("example", ALL)
def test_a_pod_that_stays_is_expected_to_run_and_one_that_ends_to_succeed(example: Example) -> None:
    pods = {(p["metadata"]["namespace"], p["metadata"]["name"]): p for p in example.pods()}
    alone = {each["metadata"]["name"] for each in of_kind(example, "Pod")}
    replicated = {name for _, name in pods} - alone  # what a StatefulSet has to start again
    using = {(use.namespace, use.pod) for use in example.uses}
    assert using <= pods.keys()
    for expected in example.expectations:
        spec = pods[expected.namespace, expected.pod]["spec"]
        stays = "sleep" in str([spec["containers"], *mounted(example, {"spec": spec})])
        may_fail = {"Failed"} if (expected.namespace, expected.pod) in using else set()
        assert expected.phase in may_fail | {"Running" if stays else "Succeeded"}
        assert spec.get("restartPolicy") == (None if expected.pod in replicated else "Never")


@pytest.mark.parametrize("example", ALL)
def test_requests_for_the_monitors_tolerate_their_taint_and_ask_for_admin_access(
    example: Example,
) -> None:
    for devices in claims(example).values():
        for request in requested(devices):
            if request["deviceClassName"] == f"monitor.{names.DRIVER}":
                [toleration] = request["tolerations"]
                assert toleration["key"] == names.MONITOR_TAINT
                assert request["adminAccess"] is True


@pytest.mark.parametrize(
    ("name", "profile"), [(each.name, each.profile) for each in examples() if each.profile]
)
def test_a_profile_that_an_example_needs_is_one_that_the_driver_reads(
    name: str, profile: Path
) -> None:
    assert decode_profile(yaml.safe_load(profile.read_text()), "default").entries
    option = f"--set-file profiles.default={profile.relative_to(REPOSITORY)}"
    assert re.search(rf"{option}( \\)?\n", (EXAMPLES / name / "README.md").read_text())


@pytest.mark.parametrize("example", [each for each in examples() if each.node_profile])
def test_a_node_profile_is_one_that_the_api_server_takes_and_selects_nodes(
    example: Example,
) -> None:
    assert example.node_profile
    profile = read_node_profile(yaml.safe_load(example.node_profile.read_text()))
    assert not profile.problem
    assert decode_rules(profile.rules, profile.name).entries
    [(label, value)] = profile.node_selector.items()
    text = (EXAMPLES / example.name / "README.md").read_text()
    for line in (
        f"kubectl label node NODE {label}={value}",
        f"kubectl apply --filename {example.node_profile.relative_to(REPOSITORY)}",
        f"kubectl delete --filename {example.node_profile.relative_to(REPOSITORY)}",
        f"kubectl label node NODE {label}-",
    ):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize(
    ("name", "profile"), [(each.name, each.bundled) for each in examples() if each.bundled]
)
def test_a_profile_without_a_file_comes_with_the_driver_and_is_chosen_by_label(
    name: str, profile: str
) -> None:
    assert (REPOSITORY / f"dra_driver/profiles/{profile}.yaml").is_file()
    text = (EXAMPLES / name / "README.md").read_text()
    assert f"\nkubectl label node NODE gpu.nvidia.com/profile={profile}\n" in text
    assert "\nkubectl label node NODE gpu.nvidia.com/profile-\n" in text


@pytest.mark.parametrize("example", [each for each in examples() if each.layouts])
def test_layouts_that_an_example_needs_are_ones_that_the_driver_reads(example: Example) -> None:
    assert example.layouts
    assert example.profile
    layouts = decode_layouts(yaml.safe_load(example.layouts.read_text()), "layouts")
    profile = decode_profile(yaml.safe_load(example.profile.read_text()), "default")
    named = {entry.rules.mig.layout for entry in profile.entries}
    assert named <= layouts.keys()
    assert not any(isinstance(layout, tuple) for layout in layouts.values())
    option = f"--set-file profiles.layouts={example.layouts.relative_to(REPOSITORY)}\n"
    assert option in (EXAMPLES / example.name / "README.md").read_text()


@pytest.mark.parametrize("example", ALL)
def test_an_example_that_not_every_node_can_run_names_a_simulated_one(example: Example) -> None:
    asks_for_mig = any("mig" in text for text in (example.bundled, example.name))
    assert bool(example.simulated) is asks_for_mig
    if example.simulated:
        node = yaml.safe_load(node_file(example.simulated).read_text())
        assert len(node["gpus"]) >= example.gpus


@pytest.mark.parametrize("example", ALL)
def test_the_readme_shows_the_commands_of_its_example(example: Example) -> None:
    text = (EXAMPLES / example.name / "README.md").read_text()
    path = f"deploy/examples/{example.name}/{example.name}.yaml"
    [check] = re.findall(r"^# Check with: (.+)$", example.manifest.read_text(), re.MULTILINE)
    for command in (f"kubectl apply --filename {path}", check, f"kubectl delete --filename {path}"):
        assert f"\n{command}\n" in text


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"^\| \[([\w-]+)\]\(\1/\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(example.name for example in examples())


def test_a_sentence_becomes_the_checks_it_says() -> None:
    sentence = (
        'Expect pod/a in b: Running, log shows 1 GPU, log of c contains "x, y", '
        "log shows the GPUs of pod/d in e, log of c shows other GPUs than f, "
        "log shows 2 partitions, log of c shows other partitions than f, "
        'log shows the partitions of f, events contain "g"'
    )
    assert expectation(sentence) == Expectation(
        "b",
        "a",
        "Running",
        (
            ShowsCount(Log("b", "a"), 1),
            Contains(Log("b", "a", "c"), "x, y"),
            Compares(Log("b", "a"), Log("e", "d"), True),
            Compares(Log("b", "a", "c"), Log("b", "a", "f"), False),
            ShowsCount(Log("b", "a"), 2, "partition"),
            Compares(Log("b", "a", "c"), Log("b", "a", "f"), False, "partition"),
            Compares(Log("b", "a"), Log("b", "a", "f"), True, "partition"),
            Contains(Events("b", "a"), "g"),
        ),
    )


def test_what_an_example_needs_and_uses_is_read_from_its_comment(tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    folder.joinpath("some.yaml").write_text(
        "# Some example.\n#\n"
        "# Needs 2 GPUs on one node and Kubernetes 1.36, with the profile other.yaml: free ones.\n"
        "# Uses 3Gi of GPU memory: pod/a in b.\n"
        "# Expect pod/a in b: Failed, log shows 1 GPU\n"
        "---\n# Expect nothing of a comment further down\n"
    )
    assert read(folder) == Example(
        "some",
        folder / "some.yaml",
        2,
        36,
        (Expectation("b", "a", "Failed", (ShowsCount(Log("b", "a"), 1),)),),
        folder / "other.yaml",
        (Uses("b", "a", 3 << 30),),
    )


def test_a_profile_that_comes_with_the_driver_has_a_name_only_and_layouts_are_a_file(
    tmp_path: Path,
) -> None:
    for name, need in (
        ("a", "with the profile mig"),
        ("b", "with the profile own.yaml and the layouts quarters.yaml: idle"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        lines = f"# Needs 1 GPU on one node and Kubernetes 1.36, {need}.\n# Simulated as a30x1.\n"
        folder.joinpath(f"{name}.yaml").write_text(lines)
    example = read(tmp_path / "a")
    assert (example.bundled, example.profile, example.layouts) == ("mig", None, None)
    example = read(tmp_path / "b")
    assert (example.bundled, example.simulated) == ("", "a30x1")
    assert (example.profile, example.layouts) == (
        tmp_path / "b/own.yaml",
        tmp_path / "b/quarters.yaml",
    )


@pytest.mark.parametrize(
    "sentence",
    [
        pytest.param("Expect pod/a in b: Done, log shows 1 GPU", id="a phase that does not exist"),
        pytest.param("Expect pod/a: Running, log shows 1 GPU", id="no namespace"),
        pytest.param("Expect pod/a in b: Running", id="nothing about the log"),
        pytest.param("Expect pod/a in b: Running, log shows GPUs", id="no number"),
        pytest.param("Expect pod/a in b: Running, log has 1 GPU", id="another verb"),
    ],
)
def test_a_sentence_of_another_form_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match="another form"):
        expectation(sentence)


LOG_CHECKS = {
    "one GPU, named twice": ("shows 1 GPU", f"{FIRST} {FIRST}", "", None),
    "no GPU": ("shows 1 GPU", "", "", "shows 0 GPUs instead of 1"),
    "the text is there": ('contains "GPU 0:"', "GPU 0: H100", "", None),
    "it is not": ('contains "GPU 0:"', "GPU 1: H100", "", "lacks 'GPU 0:'"),
    "theirs and more": ("shows the GPUs of pod/b in n", f"{FIRST} {SECOND}", FIRST, None),
    "not theirs": ("shows the GPUs of pod/b in n", FIRST, SECOND, f"lacks ['{SECOND}']"),
    "nothing to compare with": ("shows the GPUs of pod/b in n", FIRST, "", "shows no GPU"),
    "others": ("shows other GPUs than pod/b in n", FIRST, SECOND, None),
    "one partition": ("shows 1 partition", f"{FIRST} {PARTITION}", "", None),
    "the GPU of a partition is one GPU": ("shows 1 GPU", f"{FIRST} {PARTITION}", "", None),
    "no partition to compare with": (
        "shows the partitions of pod/b in n",
        f"{FIRST} {PARTITION}",
        FIRST,
        "shows no partition",
    ),
    "the same partition": (
        "shows other partitions than pod/b in n",
        f"{FIRST} {PARTITION}",
        f"{FIRST} {PARTITION}",
        f"shows ['{PARTITION}']",
    ),
    "the same": ("shows other GPUs than pod/b in n", FIRST, FIRST, f"shows ['{FIRST}']"),
}


@pytest.mark.parametrize(
    ("condition", "own", "theirs", "problem"), LOG_CHECKS.values(), ids=LOG_CHECKS
)
def test_logs_are_held_against_the_checks(
    condition: str, own: str, theirs: str, problem: str | None
) -> None:
    [check] = expectation(f"Expect pod/a in n: Running, log {condition}").checks
    logs: dict[Log | Events, str] = {Log("n", "a"): own, Log("n", "b"): theirs}
    answer = wrong(check, logs.__getitem__)
    assert problem in answer if problem and answer else answer == problem
