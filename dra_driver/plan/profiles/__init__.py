"""Which profile a node has, and what its document means for each GPU."""
