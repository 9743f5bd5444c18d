"""The files and programs of a simulated host: device nodes, /proc, /sys, driver, tools."""
