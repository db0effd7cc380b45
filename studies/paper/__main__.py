"""`python -m studies.paper EXPERIMENT`, in the folder of the repository: the same as `copfl reproduce EXPERIMENT`."""

import sys

from copfl.cli.main import main

sys.argv.insert(1, "reproduce")
main()
