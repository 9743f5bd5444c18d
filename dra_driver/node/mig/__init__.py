"""MIG on this machine, through NVML: how GPUs can be cut, what is cut, and changes of both.

``geometry`` reads how a board can be cut, ``instances`` what is cut of it and ``uuids`` how that is
called, ``cutting`` are the calls that change it, ``partitions`` does that patiently and one after
the other (``turns``), ``modes`` switches MIG mode, ``virtual_machines`` says where nobody can,
``boards`` is what is asked about a GPU before and after, ``holders`` names who is in the way, and
``capabilities`` finds the device files of what was cut.

What is said of NVML here: the comments of nvml.h, and NVIDIA's MIG user guide.
"""
