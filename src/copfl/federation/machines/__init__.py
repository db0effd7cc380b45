"""Flower and processes: the only room that imports `flwr`."""
