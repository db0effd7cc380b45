"""The paper's tables and figures, run again: `copfl reproduce ITEM`.

items        what an item is: rows, columns, protocols and the paper's claims, all of it data (items/*.toml, setup.toml)
store        a small record of every run, which is all that tables and figures are made of
sitting      the runs that are missing, one after the other, for as long as there is time
findings     cells, paired differences, and what may be said of each claim
pages        Markdown: ours beside the paper's
figures      curves and maps, with their spread
commands     `copfl reproduce`
"""
