"""The driver's container image, made without a container engine: what hack/image runs.

Its files are those of a few Debian packages (``debian``), of the locked wheels and of the driver
(``wheels``). ``contents`` says which of them it keeps. The Python of the image itself compiles and
packs them (``layers``), so that the bytes do not depend on this machine's Python or zlib. ``oci``
writes the archive, ``sbom`` what is in it.
"""
