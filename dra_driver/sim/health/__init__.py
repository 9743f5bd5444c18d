"""The health of simulated GPUs: what the node file says of it, and what NVML tells.

* ``spec``: the fields of a node file; ``readings`` and ``events``: NVML's functions that tell them.
* ``resets``: what a reset of a GPU cured.
"""
