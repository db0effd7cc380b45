"""The server of a federation: rounds, exchanges with the nodes, the data contract, members, certificates.

Its modules:

    rounds, statistics            a training; the sums before it. Each has an exchange:
    exchange, secure_exchange     messages to the clients: the server sees each upload, or their sum alone
    registry                      which node is which client
    folder, bundle                the files of a run; its global model for people without a node
    membership, invitations       who is a member, whose key is revoked; who was invited, and what they answered
    agreement, certificates       the data contract of an app; TLS
"""
