"""The image: built from the lock file, from files that exist, without what only building needs."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.deploy.chart import CHART, REPOSITORY

DOCKERFILE = (REPOSITORY / "deploy/Dockerfile").read_text()
IGNORE = (REPOSITORY / "deploy/Dockerfile.dockerignore").read_text().splitlines()
STAGES = DOCKERFILE.replace("\\\n", "").split("\nFROM ")[1:]


def copied() -> set[str]:
    """What the first stage takes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    return {source for line in lines for source in line.split()}


def test_everything_that_is_copied_exists_and_is_let_in() -> None:
    assert IGNORE[1] == "*"
    allowed = [line.removeprefix("!") for line in IGNORE if line.startswith("!")]
    for source in copied():
        assert (REPOSITORY / source).exists(), source
        assert any(Path(source).match(pattern) for pattern in allowed), source


def test_the_image_holds_the_packages_that_the_project_ships() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    [packages] = re.findall(r"^packages = \[(.+)\]$", project.partition("[tool.mypy]")[0], re.M)
    assert set(re.findall(r'"(\w+)"', packages)) <= copied()


def test_every_download_is_a_wheel_held_against_its_hash() -> None:
    assert "PIP_ONLY_BINARY=:all:" in STAGES[0]
    assert "PIP_REQUIRE_HASHES=1" in STAGES[0]
    installs = re.findall(r"(PIP_REQUIRE_HASHES=0 )?pip (?:--python \S+ )?install (.+)", STAGES[0])
    assert installs == [
        ("", "--requirement requirements-runtime.lock"),
        ("", "--requirement build.lock"),
        ("PIP_REQUIRE_HASHES=0 ", "--no-deps /wheel/*.whl"),
    ]


def test_what_builds_the_wheel_is_in_the_lock_file() -> None:
    [script] = re.findall(r"sed -nE '(.+)' requirements-dev.lock >build.lock", STAGES[0])
    picked = subprocess.run(
        ["sed", "-nE", script, REPOSITORY / "requirements-dev.lock"],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout
    names = re.findall(r"^(\S+)==", picked, re.MULTILINE)
    assert names == ["hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers"]
    assert all("--hash=" in entry for entry in re.split(r"^(?=\S)", picked, flags=re.M)[1:])


def test_the_last_stage_compiles_the_standard_library_and_nothing_else(tmp_path: Path) -> None:
    [command] = re.findall(r"^RUN (.+)$", STAGES[1], re.MULTILINE)
    for place in ("", "email", "site-packages/pip"):
        (tmp_path / "python3.13" / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "python3.13" / place / "module.py").write_text("value = 1\n")
    here = command.replace("/usr/local/lib", str(tmp_path)).replace("python", sys.executable, 1)
    subprocess.run(["sh", "-c", here], timeout=30, check=True)
    compiled = {path.parents[1].name for path in tmp_path.rglob("*.pyc")}
    assert compiled == {"python3.13", "email"}


def test_the_last_stage_starts_the_driver() -> None:
    assert STAGES[1].rstrip().endswith('ENTRYPOINT ["dra-driver"]')


def test_the_chart_asks_for_the_image_that_hack_image_builds() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    script = (REPOSITORY / "hack/image").read_text()
    assert f"name=${{1:-{values['image']['repository']}:$(" in script
    assert values["image"]["tag"] == ""
