"""FedCE (Jiang et al., CVPR 2023): weights from how far updates and data differ from the others'."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import ClientOutput, Data, Metrics, Plan, State, Task, one_of, tree
from copfl.core.payload import Update
from copfl.parts.averaging import Averaging, combined, personal_of, shared_of, weighted_mean
from copfl.parts.cowa import cosine, whole_without

COMBINE = {"times": 1, "plus": 2, "equal": 1}  # and how many weights a client then has
ERRORS = ("accuracy", "loss")


class Server(NamedTuple):
    w: Tensor  # [s]
    weight: Tensor  # [k], the sum of the last round's weights
    round: Tensor  # [] int64


Down = Server  # the server sends its whole record


class Client(NamedTuple):
    personal: Tensor  # batch-norm statistics, where they are local
    moments: State
    sent: Tensor  # [s], its last upload
    seen: Tensor  # [s], the global model that it was trained from
    weight: Tensor  # [k], its weights in that round's mean
    round: Tensor  # [] int64, that round; -1 before the first
    closeness: Tensor  # [], running mean of the cosines
    error: Tensor  # [], running mean of the errors without it
    measured: Tensor  # [], of how many rounds


class Upload(NamedTuple):
    w: Tensor  # [s]
    weight: Tensor  # [k], unnormalised


class Total(NamedTuple):
    w: Tensor  # [k, s], sum of weight * w
    weight: Tensor  # [k]


@dataclass(frozen=True)
class FedCE(Averaging):
    """The mean weighted by 1 - cosine with the others' update and the error of the model without the client.

    Both are running means over the rounds. Paper: the server compares the updates of this round, before it
    weighs them. Here a client compares its last update with the rest of the server's last step, out of sums
    alone: a round's comparison has an effect one round later. The error is that on the training samples:
    nothing is held out.

    combine  "times": the product of both (published); "plus": the mean of both, each normalised first;
    "equal": 1 error    "accuracy": 1 - accuracy, as the paper's 1 - Dice; "loss": cross-entropy
    """

    combine: str = "times"
    error: str = "accuracy"

    weights: ClassVar[str] = "equal"  # type: ignore[misc]  # no option: the scores are the weights

    fine_tuned = True
    summable: ClassVar = MappingProxyType({"combine": "times"})  # "plus" has two sums with different weights

    def __post_init__(self) -> None:
        one_of(COMBINE, combine=self.combine)
        one_of(ERRORS, error=self.error)
        super().__post_init__()

    def downlink(self, server: Server, ids: Tensor) -> Down:
        return tree.repeat(server, len(ids))

    def server_init(self, task: Task, clients: int) -> Server:
        w = shared_of(task, self.personal, task.initial)
        return Server(w, w.new_zeros(COMBINE[self.combine]), torch.zeros_like(w[0], dtype=torch.int64))

    def client_init(self, task: Task) -> Client:
        personal, moments = super().client_init(task)
        w, zero = shared_of(task, self.personal, task.initial), task.initial.new_zeros(())
        never = torch.full_like(zero, -1, dtype=torch.int64)
        weight = w.new_zeros(COMBINE[self.combine])
        return Client(personal, moments, w, w, weight, never, zero, zero, zero)

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        closeness, error, measured = self._measured(task, client, down, data)
        started = measured > 0  # the first round's weights are equal
        gradient, lack = torch.where(started, 1 - closeness, 1), torch.where(started, error, 1)
        weights = {"times": [gradient * lack], "plus": [gradient, lack], "equal": [torch.ones_like(lack)]}
        # Where all weights are zero the clients weigh the same.
        weight = torch.stack(weights[self.combine]).clamp(min=1e-6)  # [k]
        start = self.global_model(task, client, down)
        w, moments, loss = self.fit(task, start, client.moments, data, plan)
        personal, sent = personal_of(task, self.personal, w), shared_of(task, self.personal, w)
        after = Client(personal, moments, sent, down.w, weight, down.round, closeness, error, measured)
        scores = {"gradient_score": gradient, "prediction_score": lack}
        return ClientOutput(after, Upload(sent, weight), w, {"loss": loss, "weight": weight.mean(), **scores})

    def counted(self, client: Client, down: Down, update: Update) -> Client:
        """The comparison with the others removes what is in the mean."""
        assert update.reported_weight is not None
        return client._replace(sent=update.sent, weight=update.reported_weight)

    def _measured(self, task: Task, client: Client, down: Down, data: Data) -> tuple[Tensor, Tensor, Tensor]:
        """The running means of the cosine and the error, and their number, including this round."""
        present = client.round == down.round - 1  # whether it is in the last mean
        alpha = torch.where(present, (client.weight / down.weight.clamp(min=1e-30)).mean(), 0)
        update, d = client.seen - client.sent, task.d
        others, model = whole_without(down.w, client.seen, client.sent, update, alpha, client.round >= 0)
        # The shared vector begins with all parameters; averaged statistics give no direction.
        closeness = cosine(update[:d], others[:d])
        loss, accuracy = task.evaluate(combined(task, self.personal, client.personal, model), data)
        error = 1 - accuracy if self.error == "accuracy" else loss
        count = client.measured + (down.round > 0)
        rate = torch.where(down.round > 0, 1 / count.clamp(min=1), 0)
        return torch.lerp(client.closeness, closeness, rate), torch.lerp(client.error, error, rate), count

    def summand(self, task: Task, server: Server, id: Tensor, upload: Upload) -> Total:
        return Total(upload.weight[:, None] * upload.w, upload.weight)

    def server_update(self, task: Task, server: Server, total: Total) -> tuple[Server, Metrics]:
        means = weighted_mean(total.w, total.weight[:, None], server.w)  # [k, s]
        return Server(means.mean(0), total.weight, server.round + 1), {}
