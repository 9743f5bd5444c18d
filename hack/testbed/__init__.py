"""A real single-node Kubernetes on loopback for tests, demo and benchmarks.

Read in this order: `cluster` (what up and down do), `components` (the programs and their command
lines), `assets` (where the programs come from), `leftovers` (how nothing stays behind).
"""
