"""The files of a simulated host for a command that looks at one, and goes again."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dra_driver.settings import ClaimsSettings


@contextlib.contextmanager
def host_directory(settings: ClaimsSettings) -> Iterator[Path]:
    """A directory for them. What the plugin of these *settings* did to the GPUs of its simulated
    host (how they are cut, their compute modes) is there as it is on GPUs that several processes
    look at; its own files are left alone, since they may be of another node."""
    with tempfile.TemporaryDirectory() as made:
        host = Path(made)
        if settings.sim:
            _copy(settings.state / "sim", host)
        yield host


def _copy(plugins: Path, host: Path) -> None:
    # Imported here: a node with GPUs has no use for it.
    from dra_driver.node.sim.host import MARKER
    from dra_driver.node.sim.tools import SETTINGS

    with contextlib.suppress(OSError):  # there is none, or it is not for us to read
        if (plugins / SETTINGS).is_dir():
            (host / MARKER).write_text("[]")  # of what is copied nothing is the host's own
            shutil.copytree(plugins / SETTINGS, host / SETTINGS)
