"""``dra-driver mps-agent``: keeps the MPS servers of a node, whatever becomes of the plugin.

* ``requests``: what is asked, as values; ``service``: the socket that it comes in by.
* ``supervisor``: all servers, and who waits for whom; ``server``: the life of one of them.
* ``spaces``: what is in it, and what is kept ready for the next claim; ``mending``: what somebody
  changed there; ``health``: how well a server is, as far as was seen.
* ``leftovers``: what nobody wrote of; ``others``: daemons that are not ours.
* ``state``: what is written down before it is done, so that a killed agent leaves nothing behind.
* ``tools``: what all of them use; the daemons are ``node.mps``.
* ``metrics``, ``run``: the process.
"""
