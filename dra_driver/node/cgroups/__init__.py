"""Pods, containers and processes of this machine, as cgroups and /proc show them."""
