"""Prepares and unprepares claims, and looks after prepared ones."""
