"""How often the intervals and verdicts of a comparison are right, by simulation: docs/statistics.md."""
