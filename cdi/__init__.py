"""CDI, the Container Device Interface: what a container runtime does when it is given a device.

CDI is an agreement by files. A vendor writes a *spec* into a directory; it names devices, and says
for each what giving it to a container means: device nodes, mounts, environment variables, hooks.
A runtime that is asked for ``vendor.example/gpu=gpu-0`` finds the spec and edits the container's
OCI configuration accordingly. This package speaks both sides of it. It knows files, no hardware
and no orchestrator, and needs PyYAML only.

The agreement: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md


A spec is a value
=================

Say what a device needs; edits add with ``+``.

>>> from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Mount, Spec
>>> node = ContainerEdits(device_nodes=(DeviceNode("/dev/gpu0"),))
>>> library = ContainerEdits(
...     mounts=(Mount("/opt/lib/libgpu.so", "/usr/lib/libgpu.so", options=("ro", "rbind")),),
... )
>>> spec = Spec(
...     kind="vendor.example/gpu",
...     devices=(CdiDevice("gpu-0", container_edits=node + library),),
...     container_edits=ContainerEdits(env=("GPU_DRIVER=1.2",)),
... )

A value is not checked until it is used; then everything that is wrong is said at once.

>>> from cdi.validate import check, oldest_version
>>> check(Spec("vendor.example", devices=(CdiDevice("gpu 0", container_edits=node),)))
Traceback (most recent call last):
cdi.errors.CdiSpecError: kind: must be 'vendor/class'; devices[0].name: must begin and end with a \
letter or digit, with only letters, digits, '_', '-', '.', ':' between


A spec is a text
================

The version is not chosen but found: the oldest that can say the spec, for the oldest runtimes.

>>> oldest_version(spec)
'0.3.0'
>>> from cdi.encoding import from_text, to_json
>>> text = to_json(spec)
>>> print(text[:53], "...")
{"cdiVersion": "0.3.0", "kind": "vendor.example/gpu", ...
>>> from_text(text) == spec
True


A spec is a file
================

``cdi.store`` writes files that appear at once or not at all; ``cdi.registry`` reads directories as
runtimes do; ``hack.cdi_apply`` edits an OCI configuration as runtimes do. They touch the machine;
an import line tells who does.

>>> import tempfile
>>> from hack.cdi_apply import inject
>>> from cdi.store import SpecStore
>>> null = ContainerEdits(env=("GPU=0",), device_nodes=(DeviceNode("/dev/gpu0", "/dev/null"),))
>>> spec = Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", container_edits=null),))
>>> with tempfile.TemporaryDirectory() as directory:
...     _ = SpecStore(directory, "vendor.example", "gpu").write(spec, "some-id")
...     config = inject({"ociVersion": "1.2.0"}, ["vendor.example/gpu=gpu-0"], [directory])
>>> config["process"]
{'env': ['GPU=0']}
>>> config["linux"]["resources"]["devices"]
[{'allow': True, 'type': 'c', 'major': 1, 'minor': 3, 'access': 'rwm'}]


Where to start reading
======================

::

    errors     what can go wrong, as a small tree
    spec       the values, how edits add, and which names are legal
    validate   everything that is wrong with a spec, and the oldest version that can say it
    encoding   the file format: a spec to text and back
    store      write, remove, list files
    registry   find devices in directories

Runtimes keep what they read. Never write other content for a device name that was used before:
put something unique into the name, such as the id of what the device was made for.
"""
