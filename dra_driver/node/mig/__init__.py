"""Partitions of GPUs, as NVML knows them.

``geometry`` reads how a board can be partitioned and ``instances`` which partitions it has;
``partitions`` creates and removes them and ``modes`` switches MIG mode, where ``gpu_locks`` gives
each change its time and ``gpu_holders`` says who is in its way; ``capabilities`` finds the device
files that let a container use a partition.
"""
