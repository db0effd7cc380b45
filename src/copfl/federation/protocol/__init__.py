"""What server and nodes must agree on, and nothing else. Nothing here knows how a node or a server works.

Its modules:

    messages, events              what is sent over any network; what is logged of it
    keys, words                   who signs, and how people compare keys by telephone
    proposal, invitation          the documents that are signed: of a run, and to a site
    settings, statistics          the terms of a training, and of sums for encoders: the same values on all machines
    secure_sum                    SecAgg+ without messages, over secure_graph, secret_sharing, secure_members
    secure_total, noise           what is added up in it; clipped and noised uploads
    round_record                  a round that has ended: a line of the server's rounds.jsonl
    chained_log, files            a log that shows what was changed; small files
    app_folder, node_config       where the things of a folder are; what a node's owner set
"""
