"""The one door to NVML: every call has a deadline, every error is a NodeError."""
