"""``hack/demo``: from nothing to pods with simulated GPUs on a real Kubernetes, and back.

It does what an administrator and a user would, with kubectl: a cluster, the chart (as helm renders
it), pods.
Only the chart's DaemonSets are left out, so that no image has to be built first: the plugin and the
MPS agent run as processes of this machine, the plugin with a token of the chart's service account
that is bound to the node.

Read in this order: ``stage`` (what is done, and undone), ``plugin``, ``agent`` and ``kubectl``
(how), ``manifests`` (of the pods), ``page`` (what is shown in the end; pure), ``progress`` (what is
said meanwhile).
"""
