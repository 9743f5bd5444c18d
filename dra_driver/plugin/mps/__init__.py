"""Watches claims under MPS: who is not served, who bypasses it, whose pods end."""
