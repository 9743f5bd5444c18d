"""CUDA's Multi-Process Service on this machine: its control daemons, their commands and mounts."""
