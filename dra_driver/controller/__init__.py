"""The process once per cluster: rolls NodeProfiles out over the nodes."""
