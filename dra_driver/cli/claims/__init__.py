"""``dra-driver claims``: who holds how much of what on this node, and what is free."""
