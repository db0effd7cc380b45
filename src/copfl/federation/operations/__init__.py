"""What people look at and keep: of a server its coordinator, of a node its owner. Nothing here trains or adds up.

Its modules:

    watched, history              a server's folder and its audit log, read without torch: for the two below
    status, page                  `copfl federate status` and `watch`; `sections` has the parts of the page
    run_log                       the log that a server's run writes: lines, audit log, metrics
    joining                       a site takes part: what its owner reads, and the folder that it has then
    backup, retention             copies of a folder; what of it may be forgotten
"""
