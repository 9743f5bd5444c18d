"""Which GPUs this node has, and why some of them are unavailable."""
