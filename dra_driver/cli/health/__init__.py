"""``dra-driver health``."""
