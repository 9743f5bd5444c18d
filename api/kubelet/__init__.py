"""The kubelet's gRPC protocols: .proto files, and code made by hack/update-protos."""
