"""What every part of the driver uses and what knows neither Kubernetes nor GPUs: errors, logs,
deadlines, backoff, files, threads, HTTP and signals.
"""
