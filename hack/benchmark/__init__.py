"""What the driver costs on a real Kubernetes: hack/bench.

Start with ``figures`` (what is measured, and the aims), then ``__main__`` (the order). ``stage`` is
the cluster with the chart and a plugin on it; ``claims`` and ``calls`` are the claims and the
kubelet's part; ``starts``, ``prepares``, ``idles`` and ``pods`` each measure some figures.

What is compared is measured in turns within one run: absolute times differ from machine to machine
and from hour to hour.
"""
