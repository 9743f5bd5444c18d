"""Decides which profile is in force and which devices this node offers, and has them published."""
