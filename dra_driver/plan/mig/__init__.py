"""Partitions of GPUs, decided before anything is changed.

* ``partitions``: the partitions of one GPU, in the order in which the scheduler tries them;
* ``counters``: what keeps them apart;
* ``dynamic``: what a GPU is offered as, and which boards are switched to MIG mode;
* ``warnings``: which rules have no effect, and what is not offered;
* ``claims``: partitions come with the first claim that holds them, and go with the last;
* ``manager``: named layouts, as NVIDIA's MIG manager applies them.
"""
