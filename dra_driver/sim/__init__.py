"""Simulated GPUs: a node described in YAML stands where NVML and the host's files stand.

* ``parts``: a simulated machine in the place of this one; ``__main__`` chooses it where ``--sim``
  is set, and nothing chooses it silently.
* ``node_spec``: what a node file says, strictly read; ``live_node``: the file as it is now, so that
  GPUs come, go and fail while the driver runs.
* ``nvml``: pynvml's functions over it; they refuse what hardware refuses. ``mig``: those of MIG;
  ``health``: those that tell health.
* ``host``: the host's files, put into a directory.
* ``mps``: daemons that stand for MPS's; ``mps.client`` has processes use them.

``nodes/*.yaml`` are the nodes that ``--sim NAME`` knows; ``boards.yaml`` says what each product is.
"""
