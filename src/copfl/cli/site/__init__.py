"""`copfl site`: the commands of whoever owns data, built as in `cli.federate`."""
