"""Simulated GPUs: a node described in YAML stands where NVML and the host's files stand.

* ``node``: what a node file says, strictly read; ``boards``: what each product is.
* ``live``: the node file as it is now, so that GPUs come, go and fail while the driver runs.
* ``nvml``: pynvml's functions over it; they refuse what hardware refuses. ``mig``: those of MIG.
* ``mps``: daemons that stand for MPS's; ``mps_client`` has processes use them.
* ``tree``, ``libraries``, ``tools``: the host's files as values; ``host`` puts them into a
directory.

``nodes/*.yaml`` are the nodes that ``--sim NAME`` knows. It is never chosen silently.
"""
