"""What the driver costs on a real Kubernetes: hack/bench.

Start with ``figures`` (what is measured, and the aims), then ``__main__`` (the order). ``stage`` is
the cluster with the chart and a plugin on it; ``claims`` and ``calls`` are the claims and the
kubelet's part; ``starts``, ``prepares``, ``containerd``, ``syscalls``, ``mps``, ``partitions``,
``publishing``, ``idles`` and ``pods`` each measure some figures.

``fleet`` is apart: what the published shape of a GPU costs the scheduler, with ``fleet_nodes``
(nodes that nobody runs), ``fleet_shapes`` and ``fleet_nvidia`` (their slices) and ``bursts`` (of
pods) on a control plane of its own.

What is compared is measured in turns within one run: absolute times differ from machine to machine
and from hour to hour.
"""
