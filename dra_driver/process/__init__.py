"""What every long-running process of the driver has."""
