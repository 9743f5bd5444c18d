"""NVIDIA's driver on the host: where it is, its programs, device nodes and time slices."""
