"""What preparing and unpreparing a claim takes: devices, settings, container edits."""
