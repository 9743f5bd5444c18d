"""How the kubelet finds and calls the plugin: its sockets, its gRPC services, and two processes
during a rolling update.
"""
