"""What a machine's owner lets others ask of it: the policy, and the one check of a run config against it.

A node and the ServerApp check every run config before they import, open or construct anything that it names.
All names are lists of what is allowed: copfl's own algorithms, models and metrics, and code and files that
the owner entered. Code is entered with its folder and SHA-256, a file with its path on this machine; a run
config has the name alone. No message changes a policy: it is a file of the owner. Without torch, but for
`own_app` and `explanation`.
"""
