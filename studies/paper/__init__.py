"""The paper's tables and figures as data on top of `copfl.comparison`: `copfl reproduce EXPERIMENT`.

command       the command line

experiments   an experiment as data: rows, columns, protocols and claims (experiment_files, setup.toml)
records       a small record of every run; tables and figures are made of records alone
batch         runs what is missing, through `comparison.runner`
findings      cells, paired differences, and a verdict for every claim
pages         Markdown: our numbers next to the paper's
figures       curves and heat maps with their spread over seeds
"""
