"""Why pending claims and pods cannot be scheduled, by what is published; to be replaced."""
