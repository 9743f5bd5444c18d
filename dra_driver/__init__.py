"""A Dynamic Resource Allocation driver for NVIDIA GPUs. This is the map.

Read these eight files first. They follow one claim for a whole GPU, from the kubelet's gRPC call to
the CDI file:

1. ``kubeletplugin.serve.services``  one answer per claim; a bad claim never fails the others
2. ``plugin.claims.preparer``        the order of effects: record, act, record
3. ``k8s.claims``                    the claim, read live from the API server
4. ``plugin.claims.planner``         what the node offers now, and what other claims hold
5. ``plan.prepare.claim``            a plan, or a refusal, before anything is touched
6. ``node.state.ledger``             *started*, if there are steps to undo; *completed*: the answer
7. ``node.gpu_node``                 carries out the steps of the plan
8. ``plan.prepare.cdi_spec``         what the container gets, as a ``cdi.spec.Spec``

What outlives a restart is kept on disk by ``node.state``.

``docs/architecture.md`` says the same step by step; ``docs/glossary.md`` lists our words.

``dra-driver kubelet-plugin`` runs on every node with GPUs. ``plugin.run`` lists its capabilities;
each is started by one function, ``start(parts, stack)``, with what ``plugin.parts`` holds:

*Publish.* ``plugin.publish`` reads the GPUs (``node.inventory``, through ``node.nvml``), chooses
the profile (``plan.profiles``) and has ``plan.offer`` say what is offered of each GPU. What is
known of a GPU enters in ``GpuNode.refresh`` and travels as ``Gpu``, ``Device`` and slice.
``kubeletplugin.slices`` keeps the ResourceSlices so.

*Choose the API.* A node gives its GPUs out by DRA or by the device-plugin API, by one at a time.
``plan.node_api`` decides, from what ``plugin.node_api.facts`` asks; ``plugin.node_api.chooser``
looks again and again, and whoever acts on the choice reads it in ``plugin.node_api.current``.
``plugin.node_api.other_plugin`` keeps all of it back beside another device plugin.

*Prepare and unprepare.* ``plugin.claims``, as above. A share is limited by ``node.memory``, a claim
under MPS is served by the agent (``node.mps.agent_client``), a partition is created by
``node.mig``. What all containers get of NVIDIA's driver is in one CDI file, which
``plugin.claims.driver_spec`` keeps. A claim is not unprepared while a process of its pods uses it
(``plugin.claims.in_use``).

*Allocate.* Where GPUs are given out by the device-plugin API, ``plugin.device_plugin`` lists
devices and answers the kubelet (``kubeletplugin.device_plugin``, whose ``endpoint`` registers each
resource). What a container was given is an ``AllocationClaim``: prepared, recorded and looked after
as a claim is. What ids mean and who has them says ``plan.device_plugin``.

*Enforce.* ``plugin.memory`` keeps claims to their share of the memory; ``plugin.mps`` watches
claims under MPS.

*Partition.* ``plugin.mig`` applies layouts, switches MIG modes and reports lost instances; what has
to change is decided in ``plan.mig``.

*Health.* ``plugin.health`` is told of NVML's events (``node.nvml.events``) and of lost GPUs, and
looks at the others (``node.nvml.health``). ``plan.health`` decides what is wrong and which taints
the devices get; ``plan.offer`` puts them there. The kubelet (``plugin.device_health``), claims
(``plugin.claims.device_status``), events and metrics tell of it.

*Other drivers.* ``plugin.other_drivers`` tells of another driver of this name on the node.

``dra-driver mps-agent`` (``agent``) runs the MPS servers of the node and outlives the plugin.

``dra-driver controller`` (``controller``) runs once per cluster and rolls NodeProfiles out.
``controller.cluster`` follows what there is, ``plan.profiles.rollout`` decides what is written
next, ``controller.rollouts`` has it written, ``controller.writes`` writes while this process leads.

``dra-driver devices``, ``claims`` and ``doctor`` (``cli``) read and print; ``health`` also clears
problems and has a node let go of GPUs.

Layers, checked by a machine (``pyproject.toml``): ``cli``, ``plugin``, ``agent`` and ``controller``
connect; ``plan`` decides (no input, no output, no clock); ``node`` acts on this machine; ``model``
holds the values; ``kubeletplugin`` and ``k8s`` know Kubernetes but no GPU; ``base`` knows neither.
``sim`` stands above ``node`` and simulates one. ``api`` and ``cdi`` are words shared with users,
Kubernetes and container runtimes.
"""
