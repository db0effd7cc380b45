"""Studies that use the library: each has its records, its pages and the code between them."""
