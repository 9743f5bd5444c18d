"""Errors, logs, deadlines, files, threads and HTTP: what knows neither Kubernetes nor GPUs."""
