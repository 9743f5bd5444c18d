"""Which node profile holds, and what its document (or a configuration of NVIDIA's device plugin)
means for each GPU.
"""
