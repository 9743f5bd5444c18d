"""What a person types: devices, claims, doctor."""
