"""Shapley values by retraining: python studies/benefit/subsets.py OUT.jsonl --device cuda.

Six clients, one of them does harm. The federation of each of the 64 sets of clients is trained, all of them
in one program, with the seed and the batches of the run of all. So the Shapley values of these runs are
exact.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import numpy as np
import study
import torch
from torch import Tensor

from copfl.core import tree
from copfl.core.batches import plan
from copfl.core.evaluation import is_evaluated
from copfl.engine.mapping import ClientInput, local_update
from copfl.stats import Numbers, averaged

CLIENTS, ROUNDS, EVAL_EVERY = 6, 30, 3


def members(clients: int, device: torch.device) -> Tensor:
    """[sets, clients] bool: client i is in set number s if bit i of s is 1."""
    sets, bits = torch.arange(2**clients, device=device), torch.arange(clients, device=device)
    return (sets[:, None] >> bits & 1).bool()


def losses_of_sets(e: Any) -> dict[str, Numbers]:
    """By metric, the test loss of each client in the federation of each set, [sets, clients].

    A client outside of a set receives its model and trains, but its uploads do not arrive, as in
    `replay.without`.
    """
    algorithm, (task, federation, _, _), settings = e.algorithm, e.training, e.settings
    clients, device = federation.clients, task.device
    counted = members(clients, device)
    sets, ids, base = len(counted), torch.arange(clients, device=device), np.arange(clients)

    def of_all_sets(rows: Any) -> Any:
        return tree.each(lambda t: t.repeat(sets, *[1] * (t.dim() - 1)), rows)

    def as_sets(rows: Any) -> Any:
        return tree.each(lambda t: t.reshape(sets, clients, *t.shape[1:]), rows)

    data, test = (of_all_sets(split.rows(base)) for split in (federation.train, federation.test))
    servers = tree.each(torch.clone, tree.repeat(algorithm.server_init(task, clients), sets))
    records = tree.each(torch.clone, tree.repeat(algorithm.client_init(task), sets * clients))
    all_ids, found = of_all_sets(ids), list[dict[str, Tensor]]()

    def total(row: tuple[Any, Any, Tensor]) -> Any:
        """The server after the uploads of one set."""
        server, uploads, inside = row

        def summand(row: tuple[Tensor, Any, Tensor]) -> Any:
            id, upload, arrives = row
            summand = algorithm.summand(task, server, id, upload)
            return tree.each(lambda t: torch.where(arrives, t, torch.zeros_like(t)), summand)

        summands = tree.vectorised(summand, (ids, uploads, inside))
        return algorithm.server_update(task, server, tree.total(summands))[0]

    with torch.no_grad():
        for round in range(settings.rounds):
            down = tree.vectorised(lambda server: algorithm.downlink(server, ids), servers)
            sizes = federation.train.sizes[base]
            batches = plan(
                settings.seed,
                round,
                base,
                sizes,
                batch=settings.batch,
                epochs=algorithm.total_epochs,
                augment=federation.dataset.augment,
                random=task.random,
                device=device,
            )
            flat = tree.each(lambda t: t.flatten(0, 1), down)
            rows = ClientInput(all_ids, records, flat, data, test, of_all_sets(batches))
            models = ("_before", "") if is_evaluated(round, settings.rounds, settings.eval_every) else ()
            update = partial(local_update, algorithm, task, models=models)
            result = tree.vectorised(update, rows)
            if not bool((result.metrics["healthy"] > 0).all()):
                raise FloatingPointError("a client diverged")
            records = result.client
            servers = tree.vectorised(total, (servers, as_sets(result.upload), counted))
            if models:
                found.append({name: as_sets(result.metrics[name]) for name in study.LOSSES})
    last = found[-averaged(len(found)) :]
    return {name: torch.stack([one[name] for one in last]).mean(0).cpu().numpy() for name in study.LOSSES}


def to_the_others(losses: Numbers) -> dict[str, list[float | None]]:
    """By how much each client lowers the mean loss of the others, from the losses [sets, clients] of all sets."""
    sets, clients = losses.shape
    shapley, left_out = np.zeros((2, clients))
    for client in range(clients):
        others = np.delete(np.arange(clients), client)
        value = -losses[:, others].mean(1)
        for before in range(sets):
            if before >> client & 1:
                continue
            gain = value[before | 1 << client] - value[before]
            shapley[client] += gain / (clients * math.comb(clients - 1, before.bit_count()))
        left_out[client] = value[sets - 1] - value[sets - 1 - (1 << client)]
    return {"shapley": study.rounded(shapley), "left_out": study.rounded(left_out)}


def record(job: study.Job, device: str = "cpu") -> dict[str, Any]:
    """Of the run of all, see `study.record`; and by metric the values of each client by retraining."""
    started = time.monotonic()
    study.CLIENTS, study.ROUNDS, study.EVAL_EVERY = CLIENTS, ROUNDS, EVAL_EVERY
    values = study.record(job, device)
    made, _ = study.experiment(job, device)
    values["retraining"] = {name: to_the_others(losses) for name, losses in losses_of_sets(made).items()}
    return values | {"seconds": float(f"{time.monotonic() - started:.4g}")}


if __name__ == "__main__":
    study.run(record, __doc__, lambda cells: [study.Job(*cell, study.ALL) for cell in cells])
