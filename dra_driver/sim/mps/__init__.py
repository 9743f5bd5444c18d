"""Simulated MPS control daemon and server processes, for hosts of simulated nodes.

The program ``nvidia-cuda-mps-control`` (``sim/host/tools``) is a shell script, because it runs
several times for each claim and has to be quick. Through named pipes it talks to the daemon:

* ``start``: from the program's options to a running daemon.
* ``control_daemon``: the daemon's servers; ``loop``: what wakes it; ``servers``: its values.
* ``admission``: which clients are admitted; ``limits``: what a client can have.
* ``protocol2``, ``protocol3``, ``command_line``, ``static_partitions``: its commands.
* ``paths``: its directories, sockets and log; ``processes``: its server processes.
* ``client``: processes that use CUDA; ``host_snapshot``: the GPUs of the simulated host.

Only the standard library is imported, so that a daemon starts quickly. It does what is known of the
real one; where something is not known, it does the harsher of what is possible.
"""
