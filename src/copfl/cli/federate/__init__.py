"""`copfl federate`: the commands of a federation."""
