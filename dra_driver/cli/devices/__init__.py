"""``dra-driver devices``: what this node would publish."""
