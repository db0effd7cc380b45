"""What server and nodes must agree on, and nothing else. Nothing here knows how a node or a server works."""
