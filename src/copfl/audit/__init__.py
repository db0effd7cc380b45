"""The contribution of each client, measured independently of the scores that weight the clients.

shapley    Shapley values of any set function, exactly or from sampled orders
replay     a run repeated with its uploads intercepted: without a client, or for the server of any subset
audit      one run: contributions, scores, their rank correlations
tables     an audit as tables, Markdown and JSON
synthetic  a federation with four anomalous clients, and how each way of weighting treats them
"""
