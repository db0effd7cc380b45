"""Several algorithms, or several settings of one, on the same clients, with paired differences."""
