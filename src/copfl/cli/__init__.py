"""The command line: main, and one module per group of commands."""
