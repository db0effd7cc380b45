"""`python -m copfl` is the command line."""

from copfl.cli.main import main

main()
