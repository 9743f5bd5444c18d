"""Why a figure could not be measured."""


class BenchError(Exception):
    """Something could not be measured; the message says what, and what was seen instead."""
