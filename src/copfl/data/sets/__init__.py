"""Data sets by name: embedded, published, of a folder, of a hub."""
