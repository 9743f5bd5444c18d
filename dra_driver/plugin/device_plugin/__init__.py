"""Gives devices out by the device-plugin API, and takes them back when their pods have ended."""
