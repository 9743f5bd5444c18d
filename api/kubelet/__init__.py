"""The kubelet's gRPC protocols: the .proto files and the code that hack/update-protos generates
from them."""
