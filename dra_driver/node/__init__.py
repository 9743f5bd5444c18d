"""Effects on this machine: NVML, driver files, device nodes, the ledger."""
