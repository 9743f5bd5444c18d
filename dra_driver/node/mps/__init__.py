"""CUDA's Multi-Process Service on this machine: its control daemons, their commands and mounts.

The plugin asks the agent by ``agent_client``, both speak ``agent_protocol``; the rest is
the agent's.
"""
