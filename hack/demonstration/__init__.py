"""``hack/demo``: from nothing to pods with simulated GPUs on a real Kubernetes, and back.

It does what an administrator and a user would, with kubectl and helm: a cluster, the chart, pods.
Only the chart's DaemonSet is left out: nothing here builds images, so the plugin runs as a process
of this machine, with a token of the chart's service account that is bound to the node.

Read in this order: ``stage`` (what is done, and undone), ``plugin`` and ``kubectl`` (how),
``manifests`` (of the pods), ``page`` (what is shown in the end; pure), ``progress`` (what is said
meanwhile).
"""
