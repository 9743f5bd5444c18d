"""How the kubelet finds and calls the plugin: sockets, gRPC services, rolling updates."""

import os

# gRPC reads this when it is imported, which nobody else here does. Its older listener has the one
# thread that waits for calls read them, too; the newer one hands each from thread to thread.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
