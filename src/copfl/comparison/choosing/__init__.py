"""`copfl choose`: the table of losses with more candidates, within a budget, and its ranking.

budget     what it may cost
trying     a candidate on some folds: in a process, in a file, within the budget
choose     which candidates, which folds and which seeds; `copfl.choose`
ranking    the table as a ranking, and the folder
"""
