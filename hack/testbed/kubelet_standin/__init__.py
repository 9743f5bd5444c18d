"""A kubelet for machines without root, cgroups or a container runtime; DRA as the real one does it.

Against a real API server (1.34 or newer) it keeps a Node ready, registers plugins, prepares and
unprepares claims by the kubelet's rules, wipes the slices of drivers that are gone, and runs each
container's command as a plain process of this user, with what the claims' CDI specs say done to an
OCI configuration first.

What it is not: there is no isolation at all, no image (the command has to exist on this machine, or
to be mounted by a CDI spec), no mount, no device cgroup, no probe, no volume, no service account,
no exec endpoint, no expansion of $(VARIABLES), no checkpoint (after a restart it runs pods again
that had not ended), and a pod has one run, whatever its restartPolicy. Of the edits, variables are
set; mounted files and device nodes lie as links in a directory of the container's own, of which
the programs are on PATH and the libraries on LD_LIBRARY_PATH; hooks are only in the configuration,
which lies beside the output for whoever wants to check it::

    <kubelet-dir>/pods/<pod UID>/<container>/{config.json,output,root/,work/}

The end of the output is also the pod's annotation ``standin.dra.test/<container>``; with the
cluster's certificates (``--pki``), ``kubectl logs`` works too.

Read in this order: ``pods`` (the life of one pod), ``claims`` (who gets which device),
``containers`` (a process), ``node``, ``slices`` and ``logs`` (the kubelet's duties to the
cluster).
``process`` starts and ends it for a cluster of ``hack.testbed``.
"""
