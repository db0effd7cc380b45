"""How surely training together is better than what sites have alone, by losses of rows that no model saw. Pure.

drawn      the choice, and rows of each site drawn again on which it is repeated
verdict    what the choice gains over the best that sites have alone, and how surely
headline   the verdict as a sentence and as a chart
"""
