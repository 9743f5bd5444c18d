"""By which API the node gives its GPUs out, and what is done where that changes."""
