"""What is wrong with GPUs, and what follows from it."""
