"""One client of a federation: a message of the server in, an answer out. What a node reads, trains and keeps."""
