"""A command as a person types it."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dra_driver.__main__ import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Type = Callable[..., Answer]


@pytest.fixture
def type_in(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Type:
    """Run ``dra-driver`` with these words, on a machine where no kubelet ran."""
    machine = tmp_path_factory.mktemp("machine")
    monkeypatch.setenv("KUBELET_DIR", str(machine / "kubelet"))
    monkeypatch.setenv("CDI_DIR", str(machine / "cdi"))
    monkeypatch.setenv("MPS_SOCKET", str(machine / "agent.sock"))

    def run(*words: str | Path) -> Answer:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:  # argparse's own way to end
            code = int(stopped.code or 0)
        output = capsys.readouterr()
        return Answer(code, output.out, output.err)

    return run


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can enter, with a short name."""
    with tempfile.TemporaryDirectory(prefix="public-") as made:
        Path(made).chmod(0o755)
        yield Path(made)
