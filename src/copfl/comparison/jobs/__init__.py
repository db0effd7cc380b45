"""How runs are run: one job, its process, its place in a queue or a cluster."""
