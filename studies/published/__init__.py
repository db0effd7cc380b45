"""Numbers that others published, run with copfl: `python -m studies.published NAME`."""
