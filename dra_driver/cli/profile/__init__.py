"""``dra-driver profile``."""
