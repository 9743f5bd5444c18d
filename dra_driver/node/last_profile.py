"""The profile that was in force last, kept where it outlives a restart.

A label can be mistyped, or a profile broken, while the plugin is restarted: the node then goes on
with what held before, as it would have without the restart.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

import pydantic

from dra_driver.model.profiles import Profile

log = logging.getLogger(__name__)

_FORM: pydantic.TypeAdapter[Profile] = pydantic.TypeAdapter(Profile)


class LastProfile:
    """Kept in *path*. That it cannot be kept or read is told, and nothing more."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Profile | None:
        """What was kept; None: nothing, or by a release that this one does not understand."""
        try:
            return _FORM.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the last profile cannot be read", extra=facts)
            return None

    def keep(self, profile: Profile) -> None:
        """Keep *profile* instead of what was kept before; a reader sees the one or the other."""
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            temporary.write_bytes(_FORM.dump_json(profile))
            os.replace(temporary, self._path)
        except OSError as e:
            facts = {"path": str(self._path), "error": str(e)}
            log.warning("the profile in force is not kept for a restart", extra=facts)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
