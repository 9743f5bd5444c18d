"""The process on every node: the order of effects."""
