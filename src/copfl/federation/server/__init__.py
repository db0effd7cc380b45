"""The server of a federation: rounds, exchanges with the nodes, the data contract, members, certificates."""
