"""What is trained, and how surely it is better: every candidate, on rows that it did not see.

candidates   what is tried for which kind of data
folds        the held-out rows, the same for every candidate
evaluate     the table of losses: of each candidate and site, the loss of every held-out row
exceptions   at which sites another candidate is better, given what all sites show
choice       from the table to what the federation takes, and the sites that depart from it
verdict      what the choice gains over the best that sites have alone, and how surely
first_run    from the settings of a run to those that train
run          `copfl.run`
"""
