"""Why pending claims and pods can never be scheduled, judged from what is published; a later
capability replaces it.
"""
