"""What README and docs tell people to write is what cluster, chart and driver read."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from api import names
from dra_driver.controller.events import changes
from dra_driver.model.node_profiles import (
    ConditionType,
    ProfileCondition,
    ProfileStatus,
    ProgressReason,
    RolloutRules,
)
from dra_driver.model.profiles import MigRules
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.revisions import decode_rules
from dra_driver.plan.profiles.rules import decode_profile
from tests.deploy.chart import CHART, GOLDEN, REPOSITORY, helm, objects
from tests.deploy.examples import examples

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md"))]
TEXT = "".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
POINTING = [
    *PAGES,
    *(REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(REPOSITORY.glob("deploy/examples/**/README.md")),
]


def anchors(page: Path) -> set[str]:
    """The headings of *page*, as links name them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", POINTING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    }
    assert set(PAGES) - linked <= {README}


def test_an_update_of_the_chart_takes_the_values_that_are_new_in_it() -> None:
    """With ``--reuse-values`` the chart has only the values of the release before."""
    text = "".join(page.read_text() for page in POINTING)
    commands = re.findall(r"helm upgrade \S+ deploy/(?:.*\\\n)*.*", text)
    assert commands
    assert all(" --reset-then-reuse-values " in command for command in commands)


def profiles() -> dict[str, Any]:
    [block] = [block for block in BLOCKS if block.lstrip("# ").startswith("helm upgrade")]
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def test_its_profiles_are_ones_that_the_driver_reads() -> None:
    documents = profiles()["profiles"]
    read = {name: decode_profile(document, name) for name, document in documents.items()}
    assert {name: len(profile.entries) for name, profile in read.items()} == {
        "default": 1,
        "training": 1,
        "old-nodes": 1,
    }
    assert not any(profile.warnings for profile in read.values())


def test_its_profiles_that_are_objects_are_ones_that_the_driver_reads() -> None:
    blocks = [block for block in BLOCKS if block.startswith(f"apiVersion: {names.CONFIG_VERSION}")]
    health, profile = [read_node_profile(yaml.safe_load(block)) for block in blocks]
    [strict] = decode_rules(health.rules, health.name).entries
    assert len(strict.rules.health.effects) == len(strict.rules.health.xids) == 2
    assert not profile.problem
    assert len(decode_rules(profile.rules, profile.name).entries) == 2


def test_every_field_that_it_shows_of_a_profile_is_one_that_the_driver_reads() -> None:
    [gpus] = [block for block in BLOCKS if block.lstrip().startswith("gpus:")]
    [rollout] = [block for block in BLOCKS if "  rollout:" in block]
    spec = {**yaml.safe_load(gpus), **yaml.safe_load(rollout)["spec"]}
    profile = read_node_profile({"metadata": {"name": "all-fields"}, "spec": spec})
    assert not profile.problem
    assert (profile.rollout, profile.revision_history_limit) == (RolloutRules(), 10)
    decoded = decode_rules(profile.rules, profile.name)
    assert (len(decoded.entries), decoded.warnings) == (3, ())


def test_every_status_and_every_event_of_a_nodeprofile_is_explained() -> None:
    statuses = first_cells("docs/profiles.md", "| status | meaning |")
    explained = first_cells("docs/operate.md", "| event of a NodeProfile")
    assert statuses == set(ProgressReason)

    def condition(type_: ConditionType, reason: str) -> ProfileCondition:
        return ProfileCondition(type_, True, reason, "why", "2026-01-31T12:00:00Z", 1)

    others = (ConditionType.TIED, ConditionType.SLOWS_SCHEDULER)
    written = {
        event
        for reason in ProgressReason
        for event, _, _ in changes(
            ProfileStatus(),
            ProfileStatus(
                nodes=1,
                current_revision="a-5d8fbz7k2x",
                conditions=(
                    condition(ConditionType.PROGRESSING, reason),
                    *(condition(type_, type_) for type_ in others),
                ),
            ),
        )
    }
    assert explained == written


def first_cells(page: str, head: str) -> set[str]:
    """What the rows of the table that begins with *head* are about."""
    table = (REPOSITORY / page).read_text().partition(head)[2].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


@pytest.mark.cluster
@pytest.mark.timeout(1800)  # helm is built on first use
def test_its_profiles_are_values_that_the_chart_takes(tmp_path: Any) -> None:
    values = tmp_path / "profiles.yaml"
    values.write_text(yaml.safe_dump(profiles()))
    answer = helm("template", "d", str(CHART), "--namespace", "gpus", "--values", str(values))
    assert answer.returncode == 0, answer.stderr


def test_its_requests_ask_for_classes_and_capacities_that_there_are() -> None:
    claims = [block for block in BLOCKS if "deviceClassName" in block]
    named = [re.findall(r"deviceClassName: ([\w.-]+)", block) for block in claims]
    partition = [f"mig-1g-10gb.{names.DRIVER}"]
    assert named == [*[[names.DRIVER]] * 4, partition, [names.DRIVER]]
    assert {name for each in named for name in each} <= objects(GOLDEN.read_text()).keys()
    parts = [block for block in claims if "capacity" in block]
    requests = [request for block in parts for request in yaml.safe_load(block)]
    amounts = [request["exactly"]["capacity"]["requests"].keys() for request in requests]
    assert amounts == [*[{names.MEMORY}] * 2, {names.CORES, names.MEMORY}]


def test_what_it_says_of_partitions_in_a_profile_is_what_the_driver_reads() -> None:
    [block] = [block for block in BLOCKS if block.startswith("mig:")]
    spec = {"gpus": [yaml.safe_load(block)]}
    document = {"apiVersion": names.CONFIG_VERSION, "kind": "NodeProfile", "spec": spec}
    [entry] = decode_profile(document, "default").entries
    assert entry.rules.mig == MigRules(
        dynamic=True, profiles=("1g.*", "3g.*"), replicas=(("1g.10gb", 2),)
    )


def test_it_leads_to_examples_that_there_are() -> None:
    named = set(re.findall(r"\]\(deploy/examples/([\w-]+)/\)", README.read_text()))
    assert named <= {example.name for example in examples()}
    assert {"one-gpu", "quarter-gpu", "device-plugin-manifest"} <= named
    families = ("mps-", "mig-")
    assert {each.name for each in examples() if each.name.startswith(families)} <= named


@pytest.mark.parametrize(
    ("account", "roles"),
    [
        ("The plugin's account", ("ClusterRole", "Role")),
        (
            "The controller has an account of its own",
            ("controller ClusterRole", "controller Role", "controller-events Role"),
        ),
    ],
    ids=["plugin", "controller"],
)
def test_every_right_is_listed_with_its_reason(account: str, roles: tuple[str, ...]) -> None:
    page = (REPOSITORY / "docs/install.md").read_text()
    section = page.partition("## What the driver may do\n")[2].partition("\n## ")[0]
    table = section.partition(account)[2].split("\n\n")[1]
    rows = re.findall(r"^\| `([\w./]+)`.* \| ([\w:, -]+) \| (.+) \|$", table, re.MULTILINE)
    listed = {(resource, verb) for resource, verbs, _ in rows for verb in verbs.split(", ")}
    granted = {
        (f"{resource}.{group}".rstrip("."), verb)
        for role in roles
        for rule in objects(GOLDEN.read_text())[role]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert listed == granted
