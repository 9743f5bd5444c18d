"""How the kubelet finds and calls the plugin: sockets, gRPC services, rolling updates."""
