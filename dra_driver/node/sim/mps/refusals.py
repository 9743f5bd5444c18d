"""What the daemon refuses."""


class Refused(Exception):
    """The daemon says no; with its words."""
