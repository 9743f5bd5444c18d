"""The health of simulated GPUs: what the node file says of it, and what NVML tells.

* ``spec``: the fields of a node file; ``readings``: NVML's functions that tell them.
"""
