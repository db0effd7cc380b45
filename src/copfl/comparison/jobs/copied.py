"""All that a process imports before others are copied from it; its import has effects, so nothing else imports it."""

from copfl.experiment.process import importing

with importing():
    import copfl.comparison.jobs.runner  # noqa: F401
