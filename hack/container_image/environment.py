"""The environment of the image's programs, in which a benchmark starts them, too."""

from hack.container_image.layers import OPTIMIZE

TUNING = (
    "MALLOC_ARENA_MAX=1",  # one heap of the C library for all threads: Python runs one at a time
    f"PYTHONOPTIMIZE={OPTIMIZE}",
    "PYDANTIC_DISABLE_PLUGINS=__all__",  # else pydantic looks through all packages at each start
)
ENVIRONMENT = (
    "PATH=/usr/local/bin:/usr/sbin:/usr/bin",
    *TUNING,
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUNBUFFERED=1",
)
