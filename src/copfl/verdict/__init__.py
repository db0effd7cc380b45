"""How surely training together is better than what sites have alone, by losses of rows that no model saw. Pure.

drawn        rows of each site drawn again, and the choice on them
verdict      what the choice gains over the best that sites have alone, and how surely
headline     the verdict as a sentence and as a chart
exceptions   at which sites another candidate is better, given what all sites show
"""
