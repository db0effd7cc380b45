"""What is trained, and how surely it is better: every candidate, on rows that it did not see.

candidates   what is tried for which kind of data
folds        the held-out rows, the same for every candidate
evaluate     the table of losses: of each candidate and site, the loss of every held-out row
choice       from the table to what the federation takes, and the sites that depart from it
first_run    from the settings of a run to those that train
run          `copfl.run`

What the choice gains, and how surely, is in `copfl.verdict`, which a run's record needs, too.
"""
