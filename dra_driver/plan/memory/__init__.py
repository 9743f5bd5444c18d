"""How much GPU memory a claim may use and uses, and what the memory guard does about it."""
