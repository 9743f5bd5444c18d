"""How the ResourceSlices of a node are compared, written and kept as the driver wants them."""
