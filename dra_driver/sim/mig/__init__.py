"""MIG of simulated GPUs: what a board can be cut into, what was cut, and what is refused.

* ``geometry``: the profiles of each product (``geometry.yaml``); ``rules``: what fits beside what.
* ``state``: what was cut, kept in the settings of the simulated host as a driver keeps it;
  ``mode``: when the mode changes.
* ``virtual_machines``: as what a machine has a board, and what it does no more.
* ``functions``, ``compute_functions``: pynvml's functions over it; ``profile_info``: NVML's
  structures; ``devices``: MIG devices by index, those that are gone included.
* ``uuids``: UUIDs of instances that say what they are, for hosts that do not share those settings.
* ``host_files``: what follows on the host: nvidia-smi, and the ``capabilities`` that lead to an
  instance's device nodes (``minors``).
"""
