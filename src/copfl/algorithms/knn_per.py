"""kNN-Per (Marfoq et al., ICML 2022): the global model, and a vote of the client's nearest samples by its features."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from copfl.core import ClientOutput, Data, Experts, Plan, State, Task, training_split, tree, validation_split
from copfl.core.memory import Memory, recalled, vote
from copfl.core.task import EVAL_BATCH
from copfl.errors import UsageError, above
from copfl.parts.averaging import Averaging, Down
from copfl.parts.mixtures import feature_size

SHARES = 10  # of the vote that are tried: 0, 0.1, ..., 0.9


class Client(NamedTuple):
    personal: Tensor  # [p], the personal entries of the global model: local statistics
    moments: State
    w: Tensor  # [D], the global model whose features are in the memory
    memory: Memory


@dataclass(frozen=True)
class KNNPer(Averaging):
    """w is FedAvg's. A client predicts with (1 - share) * w + share * vote, where w is as received.

    neighbours  k, the samples that vote
    scale       a vote falls by exp(-squared distance / (scale * number of features))
    samples     that a client remembers at most; of more, evenly spaced ones
    holdout     every so manieth sample is never trained on, and the share is the best on these (0: the training
                samples choose it, each without its own vote)
    """

    # Paper: the memory is made once, after the last round; here in every round, of the model that the client
    # receives in it. The released program scores every share on the test samples. Its shares reach 1; here a class
    # that no neighbour has keeps some probability.
    neighbours: int = 10
    scale: float = 1.0
    samples: int = 1000
    holdout: int = 5

    minimum = (("neighbours", 1), ("samples", 1), ("holdout", 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, scale=self.scale)
        if self.holdout == 1:
            raise UsageError("holdout=1 leaves no sample to train on; it must be 0, or at least 2")

    def client_init(self, task: Task) -> Client:
        if task.criterion.kind not in ("classification", "multilabel", "regression"):
            raise UsageError(
                "knn_per mixes classes, labels or values of samples; this task is "
                f"{task.criterion.kind}. Choose another algorithm"
            )
        personal, moments = super().client_init(task)
        like, size = task.initial, feature_size(task, "knn_per")
        nothing = Memory(
            like.new_zeros(self.samples, size),
            like.new_zeros(self.samples, task.classes),
            like.new_zeros(self.samples, dtype=torch.bool),
            like.new_full((), self.neighbours, dtype=torch.int64),
            like.new_full((), self.scale * size),
            like.new_zeros(()),
        )
        return Client(personal, moments, task.initial, nothing)

    def personal_model(self, task: Task, client: Client, down: Down) -> Experts:
        """That of the client's last round: a memory fits no later model. A new client's is the global model."""
        w = torch.where(client.memory.used.any(), client.w, self.global_model(task, client, down))
        return _with_memory(w, client.memory)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w = self.global_model(task, client, down)
        trained = self.fit(
            task, w, client.moments, data, training_split(plan, self.holdout) if self.holdout else plan
        )
        # Local statistics are those of the received weights, and not of the trained ones: features depend on them.
        received = task.with_local_statistics(w, data) if task.buffers == "local" else w
        filled, places = self._remembered(task, received, data, client.memory)
        share = self._best_share(task, received, data, filled, places)
        memory = self._with_empty_places(filled._replace(share=share))
        (personal, moments), upload, _, metrics = self.output(task, trained, data)
        after = Client(personal, moments, received, memory)
        predicts = _with_memory(received, memory)
        return ClientOutput(after, upload, predicts, {**metrics, "vote": memory.share})

    def _remembered(self, task: Task, w: Tensor, data: Data, before: Memory) -> tuple[Memory, Tensor]:
        """The memory, without the places that no client of this batch fills, and [m] the sample at each place."""
        places = torch.arange(min(self.samples, data.y.shape[0]), device=data.size.device)
        kept = data.size.clamp(max=self.samples)
        chosen = (places * data.size // kept.clamp(min=1)).clamp(max=data.y.shape[0] - 1)
        x, y = tree.each(lambda t: t[chosen], (data.x, data.y))
        parts = [task.forward(w, task.numbers(x))[1] for x, _, _ in Data(x, y, kept).in_parts(EVAL_BATCH)]
        used = places < kept
        features = torch.where(used[:, None], torch.cat(parts), 0)
        targets = one_hot(y, task.classes) if task.criterion.kind == "classification" else y
        targets = torch.where(used[:, None], targets.to(w.dtype).view(len(places), task.classes), 0)
        return before._replace(features=features, targets=targets, used=used), torch.where(used, chosen, -1)

    def _with_empty_places(self, memory: Memory) -> Memory:
        """With as many places as the record of every client has."""
        missing = self.samples - memory.used.shape[0]
        rows = {name: pad(getattr(memory, name), (0, 0, 0, missing)) for name in ("features", "targets")}
        return memory._replace(**rows, used=pad(memory.used, (0, missing)))

    def _best_share(self, task: Task, w: Tensor, data: Data, memory: Memory, places: Tensor) -> Tensor:
        """[], of the shares that are tried the one with the lowest loss on the samples held out; 0 without any."""
        unseen = validation_split(data, self.holdout) if self.holdout else data
        step = self.holdout or 1
        shares = torch.arange(SHARES, device=w.device).to(w.dtype) / SHARES
        total = torch.zeros_like(shares)
        start, criterion = 0, task.criterion
        for x, y, valid in unseen.in_parts(EVAL_BATCH):
            samples = (torch.arange(start, start + len(y), device=w.device) + 1) * step - 1
            start += len(y)
            is_itself = samples[:, None] == places
            itself = torch.where(is_itself.any(1), is_itself.to(torch.int64).argmax(1), -1)
            logits, features = task.forward(w, task.numbers(x))
            predictions, voted = criterion.predictions(logits), vote(memory, features, itself)
            counted = valid & (memory.used.sum() > 1)  # a single sample has no other one to vote on it
            losses = [
                torch.where(
                    counted, criterion.test_losses(recalled(criterion, voted, predictions, share), y), 0
                )
                for share in shares.unbind(0)
            ]
            total = total + torch.stack(losses).sum(1)
        return shares[total.argmin()]


def _with_memory(w: Tensor, memory: Memory) -> Experts:
    return Experts(w[None], w.new_ones(1), memory=memory)
