"""NVIDIA's MIG manager, emulated: named layouts (mig-parted) and what has to change on a GPU to
match one.
"""
