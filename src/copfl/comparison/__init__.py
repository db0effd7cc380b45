"""Several algorithms, or several settings of one, on the same clients, and what the difference between them is.

entries      what is compared, as people write it
jobs         the run that an entry and a seed need, and the folder it is in
workers      runs carried out, in this process or in several
tuning       the settings that do best on a part cut from the clients' training samples
results      what a finished run shows
statistics   means, spreads, paired differences, intervals
rows         what a comparison found
tables       the table as text, Markdown, CSV and JSON
plots        curves, clients, heat maps
compare      all of it: `copfl.compare(...)`, `copfl.sweep(...)`
commands     `copfl compare`, `copfl sweep`
"""
