"""NVIDIA's MIG manager, emulated: layouts, and what has to change on a GPU to match one."""
