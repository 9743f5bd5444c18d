"""What no single module can promise: who imports whom, how big things are, what is named where."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
OURS = ("api", "cdi", "dra_driver", "hack")
MODULES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for package in OURS
    for path in (REPOSITORY / package).rglob("*.py")
    if "_pb2" not in path.name
)
LOCKS = ("requirements-dev.lock", "requirements-runtime.lock")
MAX_LINES = 450  # of a module

RUNTIME = {
    "grpcio",
    "kubernetes",
    "nvidia-ml-py",
    "prometheus-client",
    "protobuf",
    "pydantic",
    "pyyaml",
    "tenacity",
}

# The only hosts that our files name: nothing is fetched from an address that we wrote down.
HOSTS = {
    "docs.nvidia.com",
    "example.com",
    "github.com",
    "json-schema.org",
    "kubernetes.default.svc",
    "kubernetes.io",
    "www.apache.org",
}
ADDRESS = re.compile(r"\b[a-z]+://([\w.-]+\.[a-z]{2,})")

# Written with a space, so that this file is not its own first finding.
UNFINISHED = re.compile(rf"\b({'TO DO|FIX ME|X XX'.replace(' ', '')})\b")
PATCHING = re.compile("unittest .mock|Magic Mock|monkeypatch .setattr".replace(" ", ""))


SLOTTED = re.compile(r"@dataclass\((?=.*frozen=True)(?=.*slots=True)")


def lines(path):
    return (REPOSITORY / path).read_text().splitlines()


def tracked():
    """The text files that git has or would take, without lock files of other languages."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    paths = sorted(path for path in listed.stdout.split("\0") if path)
    return [path for path in paths if not path.endswith(".sum") and (REPOSITORY / path).is_file()]


def findings(pattern, paths):
    """``file:line: text`` of every line that *pattern* is in."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(lines(path), 1)
        if pattern.search(line)
    ]


def test_imports_point_the_right_way():
    ran = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_module_opens_with_a_sentence_on_one_line_that_says_what_it_is_for():
    wrong = []
    for module in MODULES:
        docstring = ast.get_docstring(ast.parse((REPOSITORY / module).read_text())) or ""
        first, *following = docstring.splitlines() or [""]
        if not re.fullmatch(r"\S.*[.!?]", first) or following[:1] not in ([], [""]):
            wrong.append(f"{module}: {first!r}")

    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", ["dra_driver/__init__.py", "docs/architecture.md"])
def test_the_maps_name_modules_that_there_are(page):
    text = (REPOSITORY / page).read_text()
    named = set(re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)`", text)) - {"pyproject.toml"}
    paths = {path.removesuffix(".py").removesuffix("/__init__") for path in MODULES}

    assert {name for name in named if f"dra_driver/{name.replace('.', '/')}" not in paths} == set()
    assert len(named) > 20


def test_the_maps_name_the_same_eight_files_to_read_first():
    text = (REPOSITORY / "dra_driver/__init__.py").read_text()
    files = re.findall(r"(?m)^[1-8]\. ``([\w.]+)``", text)
    page = (REPOSITORY / "docs/architecture.md").read_text()

    assert re.findall(r"(?m)^\| \[([\w/]+)\.py\]", page) == [f.replace(".", "/") for f in files]
    assert len(files) == 8


def class_names():
    """Each class of the packages with the files that define it, local and nested ones too."""
    modules_by_class: dict[str, list[str]] = {}
    for module in MODULES:
        if not module.startswith("hack/"):
            for node in ast.walk(ast.parse((REPOSITORY / module).read_text())):
                if isinstance(node, ast.ClassDef):
                    modules_by_class.setdefault(node.name, []).append(module)
    return modules_by_class


def test_a_class_has_its_name_for_itself():
    assert {name: files for name, files in class_names().items() if len(files) > 1} == {}


def test_the_glossary_names_classes_that_there_are():
    text = (REPOSITORY / "docs/glossary.md").read_text()
    named = {
        name
        for code in re.findall(r"(?m)^\|[^|]+\|[^|]+\|([^|]+)\|$", text)
        for name in re.findall(r"`(\w+)`", code)
    }

    assert named - class_names().keys() == set()
    assert len(named) > 30


def test_a_module_fits_in_a_readers_head():
    sizes = {module: len(lines(module)) for module in MODULES}
    large = [f"{module}: {size} lines" for module, size in sizes.items() if size > MAX_LINES]

    assert not large, f"find the noun that wants a module of its own: {large}"


def test_nothing_but_the_eight_is_needed_at_run_time():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[^a-z0-9-]", dependency)[0] for dependency in project["dependencies"]}

    assert named == RUNTIME
    assert "optional-dependencies" not in project


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_is_versions_and_hashes_and_nothing_else(lock):
    text = (REPOSITORY / lock).read_text()
    entry = re.compile(
        r"[a-z0-9-]+==\S+( ; [^\\\n]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", re.MULTILINE
    )

    assert entry.sub("", text) == ""


def test_every_locked_version_is_the_same_at_run_time_and_in_development():
    runtime, dev = (
        set(re.findall(r"(?m)^[a-z0-9-]+==\S+", (REPOSITORY / lock).read_text()))
        for lock in sorted(LOCKS, reverse=True)
    )

    assert runtime <= dev, f"run hack/update-lock: {sorted(runtime - dev)}"


def test_no_file_names_a_host_that_something_could_be_fetched_from():
    named = {
        f"{path}: {address.group()}"
        for path in tracked()
        for address in ADDRESS.finditer((REPOSITORY / path).read_text())
        if address.group(1) not in HOSTS
    }

    assert named == set()


def test_nothing_is_left_for_later():
    assert findings(UNFINISHED, tracked()) == []


def test_every_part_of_the_check_is_explained():
    parts = re.findall(r"(?m)^ *part (\w+) ", (REPOSITORY / "hack/check").read_text())
    explained = re.findall(r"(?m)^### (\w+)$", (REPOSITORY / "CONTRIBUTING.md").read_text())

    assert list(dict.fromkeys(parts)) == explained


def test_the_tests_that_need_a_cluster_are_where_they_are_looked_for():
    places = re.search(r'places="([^"]+)"', (REPOSITORY / "hack/test").read_text())
    assert places is not None
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        marks = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        ]
        where = path.relative_to(REPOSITORY).as_posix()
        assert "pytest.mark.cluster" not in marks or where.startswith(tuple(places[1].split()))


def test_no_test_patches_our_code():
    tests = [path for path in tracked() if path.startswith("tests/") and path.endswith(".py")]

    assert findings(PATCHING, tests) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (ADDRESS, "--index-url https:/" + "/elsewhere.net/simple"),
        (UNFINISHED, "# TO" + "DO: mend"),
        (PATCHING, "from unittest" + ".mock import patch"),
        (PATCHING, "monkeypatch" + ".setattr(os, 'fsync', fail)"),
    ],
)
def test_the_searches_find_what_they_are_for(pattern, line):
    assert pattern.search(line)


def test_the_plugin_is_a_short_list_of_capabilities() -> None:
    """A new capability is a line in the list, and changes none of the others."""
    text = (REPOSITORY / "dra_driver/plugin/run.py").read_text()

    assert len(text.splitlines()) < 125


def test_values_of_the_driver_are_made_by_its_own_decorators():
    """``base.frozen`` says why."""
    modules = [path for path in MODULES if path.startswith("dra_driver/")]
    assert [path for path in modules if any(map(SLOTTED.search, lines(path)))] == []
