"""Partitions of GPUs, decided before anything is cut.

Which are offered (``offered``), what keeps them apart (``blocks``, ``engines``) and in which order
they are tried (``order``); whether a GPU is cut at all (``cutting``), which boards are switched for
it (``switches``), what claims do to them (``claims``), and named layouts (``layouts``).
"""
