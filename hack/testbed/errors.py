"""What went wrong with the cluster, and how to mend it, in one sentence for the reader."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message names the reason and the remedy."""
