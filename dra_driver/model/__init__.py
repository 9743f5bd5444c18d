"""What exists on a node: frozen values, no behaviour beyond names and arithmetic."""
