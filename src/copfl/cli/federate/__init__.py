"""`copfl federate`: the commands of a federation, for its coordinator.

A command is a function: its keywords are the options, their annotations the help, its docstring the first line. What it
does is in `copfl.federation`, which is imported when it is called, so that --help is fast.
"""
