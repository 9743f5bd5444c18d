"""How much GPU memory each claim may use, how much it uses, and what the memory guard does about
it.
"""
