"""Several algorithms, or several settings of one, on the same clients, with paired differences.

entries   rows, grids and seeds as people write them
layers    the settings of a row, and its jobs
jobs      one run as data: settings, identity, folder
folders   run folders: locked, finished, damaged
runner    runs jobs, in this process, in several or on an executor; a finished job is not run again
executors Slurm and Dask
results   metrics of finished runs; the rows of a comparison
tables    the comparison as text, Markdown, CSV and JSON
plots     curves, clients, heat maps
search    settings drawn by Optuna, with successive halving
suitability rows that can train on the task
ranking   the result of a race
choose    the best method by a race: `copfl.choose(...)`
compare   all of it, with tuning: `copfl.compare(...)`, `copfl.sweep(...)`
"""
