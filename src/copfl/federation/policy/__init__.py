"""What a machine's owner lets others ask of it: the policy, and the one check of a run config against it.

A node and the ServerApp check every run config before they import, open or construct anything that it names.
All names are lists of what is allowed: copfl's own algorithms, models and metrics, and code and files that
the owner entered. Code is entered with its folder and SHA-256, a file with its path on this machine; a run
config has the name alone. No message changes a policy: it is a file of the owner.

Its modules:

    record, names, file  the policy; the names that it can allow; how it is read and written
    request, refusal     the check, from a run config to what is executed; what a refusal says
    fields, checks       one setting against the policy's line for it; one value against a bound
    own_code, model_size  the two that load something, after the check: the owner's code, and a model without memory
    own_app              the policy of somebody who executes an app of their own

Without torch, but for `own_app` and `model_size`.
"""
