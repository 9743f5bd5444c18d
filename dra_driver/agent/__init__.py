"""The MPS agent (``dra-driver mps-agent``): runs the MPS servers of a node."""
