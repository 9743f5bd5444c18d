"""What preparing a claim takes, and giving it back: which devices, which settings, what its
containers get.
"""
