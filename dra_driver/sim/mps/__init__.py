"""Stand-ins of MPS's control daemon and its server, for hosts of simulated nodes.

The program ``nvidia-cuda-mps-control`` (``tools/``) is a shell script, quick because it is run
several times for each claim. It talks through named pipes with the daemon, which is in here:

* ``start``: from the program's options to a running daemon.
* ``control``: the daemon: what it keeps and what it refuses; ``loop`` is what wakes it.
* ``admission``: who is let in; ``limits``: what a client can have.
* ``protocol2``, ``protocol3`` (with ``options``, ``tables``, ``partitions``, ``features``): the two
  sets of words in which it is asked; ``config``: its file.
* ``places``: its directories, sockets and log; ``processes``: those of its servers.
* ``programs``, ``users``: processes that use CUDA, and as whom they come.
* ``servers``: a server and what is in it; ``facts``: the GPUs of the simulated host.

Only the standard library is imported, so that a daemon starts quickly. What is known of the real
ones is kept; where something is not known, the harsher behaviour was chosen.
"""
