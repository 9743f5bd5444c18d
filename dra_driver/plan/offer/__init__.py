"""Which devices a node publishes, in which shape, and how they look in ResourceSlices."""
