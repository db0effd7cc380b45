"""All that the process imports of which others are copies; its import has effects, so nothing else imports it."""

from copfl.experiment.process import importing

with importing():
    import copfl.comparison.jobs.runner  # noqa: F401
