"""The health of the GPUs: what is wrong with them, since when, and who is told of it.

``monitor``         the only owner of what is known, from events, looks and scans to offers
``report``          events, metrics and logs about it
``clear_requests``  the annotation by which an administrator says that GPUs are well
``start``           connects them
"""
