"""What should happen: pure functions from values to values."""
