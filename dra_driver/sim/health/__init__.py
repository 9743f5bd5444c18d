"""The health of simulated GPUs: what the node file says of it, and what NVML tells.

* ``spec``: the fields of a node file; ``readings`` and ``events``: NVML's functions that tell them.
* ``kernel_log``: where the driver names the process of an Xid.
* ``reset``: ``nvidia-smi --gpu-reset``; ``clients``: who has GPUs open and keeps them from it;
  ``resets``: what it cured. ``boots``: what a reboot does.
"""
