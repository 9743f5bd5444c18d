"""What every test shares: which tests a plain `pytest` leaves out, and golden files."""

import gc
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from hack.testbed.layout import default_layout
from tests.account_audit import AccountAudit
from tests.fakes.poison import Poison

NEEDS = {
    "cluster": "a real Kubernetes: hack/test, or pytest -m cluster",
    "gpu": "an NVIDIA GPU: pytest -m gpu",
}
GOLDEN = Path(__file__).parent / "data/golden"

Golden = Callable[[str, str], None]
poison = pytest.StashKey[Poison]()
left_out = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="run only tests that have golden files, and write these anew",
    )


def pytest_configure(config: pytest.Config) -> None:
    # At Python's threshold of 700 objects the search for cycles takes a tenth of the CPU time.
    gc.set_threshold(50_000, 20, 20)
    # How long an example takes says more about the machine than about the code.
    quick = hypothesis.settings(deadline=None, max_examples=50)
    hypothesis.settings.register_profile("quick", quick)
    hypothesis.settings.register_profile("thorough", quick, max_examples=500)
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("quick")
    config.pluginmanager.register(AccountAudit(default_layout().audit_log), "account-audit")
    config.stash[left_out] = Counter()
    config.stash[poison] = Poison()
    config.stash[poison].swallow()


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Where two values of ``base.frozen`` differ: pytest by itself looks only into values that are
    compared by a method that ``dataclass`` wrote."""
    if op != "==" or not _are_alike(left, right) or left.__dataclass_params__.eq:  # type: ignore[attr-defined]
        return None
    name = type(left).__name__
    return [f"{name} == {name}; different:", *_differing(left, right)]


def _are_alike(left: object, right: object) -> bool:
    return type(left) is type(right) and is_dataclass(left) and not isinstance(left, type)


def _differing(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """The fields, each by its path, that differ: those of values in them, too."""
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if not field.compare or a == b:
            continue
        if _are_alike(a, b):
            yield from _differing(a, b, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}: {a!r} != {b!r}"


@pytest.hookimpl(trylast=True)  # after -k, so that what that left out is not counted again
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, what needs more than this machine has is left out, and said at the end."""
    if config.getoption("--update-golden"):
        kept = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
        _keep(config, items, kept)
    if not config.getoption("markexpr"):
        kept = [item for item in items if not _need(item)]
        config.stash[left_out].update(_need(item) for item in items if _need(item))
        _keep(config, items, kept)


def _need(item: pytest.Item) -> str:
    return next((marker for marker in NEEDS if item.get_closest_marker(marker)), "")


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for marker, count in sorted(config.stash[left_out].items()):
        terminalreporter.write_line(f"left out: {count} tests that need {NEEDS[marker]}")


@pytest.fixture(autouse=True)
def own_places(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test touches the machine's own kubelet, container runtime or driver: what is there would
    decide how it ends. But those that are for a real cluster or GPU."""
    places = request.config.stash[poison]
    before = places.touched()  # by nobody, or by what a module does when it is imported
    yield
    after = places.touched()
    if not _need(request.node):
        assert (before, after) == ((), ()), "a test stays in directories of its own"


@pytest.fixture(autouse=True)
def usual_logs() -> Iterator[None]:
    """A command that a test runs here sets up the logs of the whole process: the next test has
    them as they were, in whatever order tests are run."""
    root, level = logging.getLogger(), logging.getLogger().level
    yield
    root.setLevel(level)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the file of that name in tests/data/golden: ``golden("a.json", text)``.

    `hack/update-golden` writes the file instead; what changed is read in the diff. CDI specs, which
    are written in one line, are compared in many.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if path.parent.name == "cdi":
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"tests/data/golden/{name} does not exist: run hack/update-golden"
        assert text == path.read_text(), f"if {name} is meant to change: hack/update-golden"

    return compare
