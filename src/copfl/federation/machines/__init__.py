"""Flower and processes: the only room that imports `flwr`.

Its modules:

    client_app, server_app        what Flower calls on a node and on the server
    supernode, superlink          a node that stays connected; Flower's server, which checks apps
    flower_transport, flower_api  Flower's network as copfl's transport; its private names, in one place
    planes, connections, admission  what the server's port answers, to whom, and how many
    app, deployed                 an app in a folder; its server, and runs on it
    local, local_federation, processes  a whole federation on this machine
"""
