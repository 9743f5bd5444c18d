"""Which MPS namespaces and limits claims have, who uses them, and what is wrong with that."""
