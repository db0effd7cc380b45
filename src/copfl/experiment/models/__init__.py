"""The models of a run: the network, each client's model, new clients."""
