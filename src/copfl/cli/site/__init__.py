"""`copfl site`: the commands of whoever owns data."""
