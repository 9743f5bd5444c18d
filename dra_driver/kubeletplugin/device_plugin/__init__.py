"""Resources of the device-plugin API: nodes on which pods ask for devices by a name and a number.

Kubernetes has it since 1.10 (``k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1``). ``resources`` has
its values; ``server`` serves them to the kubelet.
"""
