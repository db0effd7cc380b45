"""The proper loss of each row, which decides what is trained; metrics translate it.

The log loss, of labels a mean; of values the squared error; of tokens the mean over those that count; of survival what
an event adds to Cox's partial log-likelihood.
"""

import numpy as np

from copfl.measures.metrics import Array, surprises
from copfl.measures.survival import risks, summed_at_risk, times_and_events


def row_losses(answers: Array, y: Array, kind: str) -> Array:
    """[n], the loss of answers; nan where there is no answer, and of a survival that is censored.

    Args:
        answers: As the metrics take predictions, of models that did not see the row.
        y: The targets.
        kind: Of the task, see `copfl.data.samples`.
    """
    if kind == "survival":
        return event_losses(risks(answers), y)
    flat = answers.reshape(len(y), -1)
    if kind == "regression":
        return np.asarray(((flat - y.reshape(len(y), -1)) ** 2).mean(1), np.float64)
    if kind == "next_token":
        counted = y >= 0
        with np.errstate(invalid="ignore"):
            return np.asarray(-np.where(counted, answers, 0).sum(1) / counted.sum(1), np.float64)
    return np.where(np.isnan(flat).any(1), np.nan, surprises(answers, y))


def event_losses(risk: Array, y: Array) -> Array:
    """[n], what each event adds to a site's negative partial log-likelihood; nan of what is censored.

    At risk are the rows that have an answer.

    Args:
        risk: [n], logarithms of hazards; nan: none.
        y: Times and events.
    """
    losses = np.full(len(y), np.nan)
    known = ~np.isnan(risk)
    if not known.any():
        return losses
    own, targets = risk[known], y[known]
    times, seen = times_and_events(targets)
    top = own.max()
    total = np.maximum(summed_at_risk(np.exp(own - top), targets, times), np.exp(own - top))
    losses[known] = np.where(seen, np.log(total) + top - own, np.nan)
    return losses
