"""What goes wrong in a demonstration."""


class DemoError(Exception):
    """A step failed; the message says why, and what to do where we know it."""
