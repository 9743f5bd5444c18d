"""The words we share with Kubernetes and with users.

* ``names``: driver name, attribute, capacity and device-class names; each string once.
* ``claim_configs``: ``GpuConfig``, ``MigDeviceConfig``, ``VfioDeviceConfig``: the opaque
  configuration that users write in ``resource.nvidia.com/v1beta1``, compatible with NVIDIA's
  driver.
* ``node_profile``: the NodeProfile that administrators write, in the same group and version.
* ``device_plugin``: the configuration file of NVIDIA's device plugin, accepted in its place.
* ``strict``: how documents are read, and what is said about a wrong one.
* ``kubelet``: the kubelet's gRPC protocols and the code generated from them (never edited).

What users write stays readable: fields are added, never removed or given another meaning. This
package imports nothing else of the project.
"""
