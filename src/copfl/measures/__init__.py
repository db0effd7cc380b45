"""What predictions are worth: metrics, the curves and scores of survival, the calibration of probabilities.

Nothing here needs torch, so neither do the door of a node and the processes that train rivals.
"""
