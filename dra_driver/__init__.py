"""The driver. (The map is written when the parts stand.)"""
