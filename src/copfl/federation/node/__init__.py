"""One client of a federation: a message of the server in, an answer out. What a node reads, trains and keeps.

Its modules:

    respond, acceptance           the door; which proposals are accepted
    node, worker                  the node and its answer as records; the process that answers
    resident, incoming            what stays in memory between messages; what is checked of a message first
    update, final, join           the answers of a training, after its last round, and of a new client
    secure_update, statistics     what is added up in secure sums; secure_phases has the phases of one
    data, known_data              the samples; by which names the node remembers them
    ledger, secure_memory, audit_log  what was given away of the data, with whom it was added up, what left
    records, halves, measured_rounds, remembered_run, bundle  further files of a run in the state-dir
    report, baseline, site, site_page, explanation  what the owner reads
"""
