"""What the first run on a table trains: chosen by the federation's cross-validation, with each site's exception.

candidates   the records, and the choice: pure
exceptions   at which sites another candidate is better, given what all sites show: pure
folds        the held-out rows, the same for every candidate
losses       of each candidate, the loss of every held-out row
first_run    from the settings of a run to those that train
file         candidates.json
"""
