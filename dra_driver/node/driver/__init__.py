"""The host's NVIDIA driver: where it is installed, its programs, device nodes, time slices and PCI
devices.
"""
