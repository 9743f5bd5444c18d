"""Amounts of memory as people read them."""

GIB = 1024**3


def gib(size: int) -> str:
    """
    >>> gib(81559 * 1024**2)
    '79.6 GiB'
    """
    return f"{size / GIB:.1f} GiB"
