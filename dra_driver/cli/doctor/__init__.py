"""``dra-driver doctor``: checks of everything that a pod with a claim needs on this node."""
