"""CUDA's Multi-Process Service on this machine: control daemons, what they are asked, their mounts.

``daemons`` is the door. A daemon is asked by the driver's own program (``control``), in the words
of its protocol (``protocol2``, ``protocol3``); its processes are found by a token in their
environment (``processes``), and live outside the container that started them (``shelter``).
"""
