"""Watches and limits the GPU memory that claims use."""
