"""Pods, containers and processes of this machine, by cgroup file system, container runtime and
/proc.
"""
