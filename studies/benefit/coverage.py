"""Do the intervals of the study contain the benefit? python studies/benefit/coverage.py OUT.jsonl --device cuda.

In every round of a run of the study, the models of 200 random halves and of their complements are compared by
all clients, which gives the benefit nearly exactly. A run draws one half in each round: 200 such draws give
intervals, and the fraction of them that contain the benefit.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import study
import torch

HALVES, DRAWS = 200, 200


def record(job: study.Job, device: str = "cpu") -> dict[str, Any]:
    """The benefit from all halves, and of the draws by client the fraction that contain it and the mean error."""
    from copfl.audit import replay
    from copfl.core import tree
    from copfl.experiment.analysis.benefit import group_benefit
    from copfl.stats import mean_of_known

    started = time.monotonic()
    e, bad = study.experiment(job, device)
    algorithm, (task, federation, *_) = e.algorithm, e.training
    clients, rng = federation.clients, np.random.default_rng(job.seed)
    ids, samples = torch.arange(clients, device=task.device), federation.train.rows(np.arange(clients))
    sides, differences = [], []  # [rounds][halves, clients]

    def repeated(rows: Any, times: int) -> Any:
        return tree.each(lambda t: t.repeat(times, *[1] * (t.dim() - 1)), rows)

    def observe(number: int, snapshot: replay.RoundSnapshot) -> None:
        summands = tree.concatenate([received.summands for received in snapshot.received])
        first = np.stack([rng.permutation(clients) < clients // 2 for _ in range(HALVES)])
        halves = torch.from_numpy(np.concatenate([first, ~first])).to(task.device)

        def messages(half: Any) -> Any:
            total = tree.total(replay.zeroed(summands, half))
            return algorithm.downlink(algorithm.server_update(task, snapshot.server, total)[0], ids)

        def loss(row: Any) -> Any:
            client, down, data = row
            return task.scores(algorithm.personal_model(task, client, down), data).loss.double()

        with torch.no_grad():
            down = tree.each(lambda t: t.flatten(0, 1), tree.vectorised(messages, halves))
            others = repeated((snapshot.clients, samples), len(halves))
            losses = tree.vectorised(loss, (others[0], down, others[1])).reshape(2, HALVES, clients).cpu()
        sides.append(np.where(first, 1.0, -1.0))
        differences.append((losses[1] - losses[0]).numpy())

    replay.observed(e, observe)
    side, difference = np.stack(sides), np.stack(differences)  # [rounds, halves, clients]
    truth = group_benefit(side.reshape(-1, clients), difference.reshape(-1, clients)).value
    hits, errors, rounds = [], [], np.arange(len(side))
    for _ in range(DRAWS):
        drawn = rng.integers(HALVES, size=len(side))
        found = group_benefit(side[rounds, drawn], difference[rounds, drawn])
        bounds = np.array([found.interval(n) for n in range(clients)])
        inside = (bounds[:, 0] <= truth) & (truth <= bounds[:, 1])
        hits.append(np.where(np.isfinite(found.error), inside, np.nan))
        errors.append(found.error)
    values = {
        "benefit": truth,
        "covered": mean_of_known(np.stack(hits)),
        "standard_error": mean_of_known(np.stack(errors)),
    }
    return {
        "bad": list(bad),
        **{name: study.rounded(value) for name, value in values.items()},
        "seconds": float(f"{time.monotonic() - started:.4g}"),
    }


if __name__ == "__main__":
    study.run(record, __doc__, lambda cells: [study.Job(*cell, study.ALL) for cell in cells])
