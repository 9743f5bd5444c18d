"""Tests stay in directories of their own: the fixture own_places sees to that, and this to it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.poison import PLACES, is_poisoned

TOUCHING = """
import os, pathlib, socket, sys
from contextlib import suppress
from tests.fakes.poison import Poison

poison = Poison()
poison.swallow()
own = pathlib.Path(sys.argv[1])
(own / "mine").write_text("")
os.listdir(own)
print(poison.touched())
for touch in (
    lambda: open("/var/lib/kubelet/plugins/gpu.nvidia.com/state/claims/x.json"),
    lambda: os.listdir("/var/lib/kubelet/plugins"),
    lambda: socket.socket(socket.AF_UNIX).connect("/run/dra-driver-gpu/mps/agent.sock"),
):
    with suppress(OSError):
        touch()
print(len(poison.touched()), poison.touched())
"""


@pytest.mark.parametrize("place", PLACES)
def test_what_is_below_a_place_of_the_machine_is_poisoned_and_what_is_beside_it_is_not(place):
    assert is_poisoned(place)
    assert is_poisoned(f"{place}/x".encode())
    assert not is_poisoned(f"{place}2/x")
    assert not is_poisoned(f"/tmp{place}")


def test_whoever_touches_such_a_place_is_noticed(tmp_path):
    output = subprocess.run(
        [sys.executable, "-c", TOUCHING, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout

    assert output.splitlines() == ["()", "3 ()"]


def test_a_test_that_touches_such_a_place_fails(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_bad():\n"
        "    os.path.exists('/x')\n"
        "    try:\n"
        "        os.listdir('/var/lib/kubelet/plugins')\n"
        "    except OSError:\n"
        "        pass\n"
        "def test_good(tmp_path):\n"
        "    os.listdir(tmp_path)\n"
    )
    repository = Path(__file__).parents[1]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"),
            *("-c", str(repository / "pyproject.toml"), f"--rootdir={tmp_path}"),
            *(f"--confcutdir={tmp_path}", str(tmp_path / "test_it.py")),
        ],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "2 passed, 1 error" in run.stdout, run.stdout + run.stderr
    assert "os.listdir /var/lib/kubelet/plugins" in run.stdout
