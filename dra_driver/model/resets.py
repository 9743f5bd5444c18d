"""What people have to do where a GPU has to be reset, or its MIG mode is not ours to change."""

from dra_driver.model.mig import Fixed


def by_hand(gpu: str) -> str:
    """How a GPU is reset; *gpu* as ``nvidia-smi -i`` takes it.

    A reset is refused while anything has the GPU open: every client of NVML does, this driver's
    plugin too, and so does persistence mode, with its daemon or without.
    """
    return (
        "drain the node and reboot it; or end all that has the GPU open, which are pods with "
        "claims, this driver's plugin (keep its pod off the node until then), monitoring agents, "
        f"nvidia-persistenced and persistence mode (nvidia-smi -i {gpu} -pm 0), and run "
        f"nvidia-smi -i {gpu} --gpu-reset"
    )


def outside(fixed: Fixed, gpu: str, on: bool) -> str:
    """Why MIG mode is not changed inside a virtual machine, and who changes it."""
    if fixed is Fixed.ALL:
        return "it is a vGPU: whether and how it is cut is said where the vGPU is made"
    return (
        "it takes a reset, which this virtual machine cannot make; have it done on the host before "
        f"the machine starts, or drain the node, run nvidia-smi -i {gpu} -mig {int(on)} and reboot "
        "it"
    )
