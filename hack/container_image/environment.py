"""The environment of the image's programs, in which a benchmark starts them, too."""

from hack.container_image.layers import OPTIMIZE

LESS_MEMORY = (
    "MALLOC_ARENA_MAX=1",  # one heap of the C library for all threads: Python runs one at a time
    f"PYTHONOPTIMIZE={OPTIMIZE}",
)
ENVIRONMENT = (
    "PATH=/usr/local/bin:/usr/sbin:/usr/bin",
    *LESS_MEMORY,
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUNBUFFERED=1",
)
