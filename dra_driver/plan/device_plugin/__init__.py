"""What a node lists by the device-plugin API, what device ids mean, and which are preferred."""
