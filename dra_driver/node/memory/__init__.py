"""GPU memory limits that the driver enforces on the cgroups of pods."""
