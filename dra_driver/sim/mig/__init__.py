"""MIG of simulated GPUs: how a board can be partitioned, its partitions, and what is refused.

* ``geometry``: the profiles of each product (``geometry.yaml``), and what fits beside what.
* ``state``: MIG mode and instances, kept in the settings of the simulated host as a driver would.
* ``gpu_instances``, ``compute_instances``, ``devices``: pynvml's functions over it, with
  ``nvml_structures``.
* ``identifiers``: UUIDs of instances that say what they are, for hosts that do not share those
  settings; minor numbers of capabilities.
* ``host_files``: the files that follow on the host, for nvidia-smi and for device nodes.
"""
