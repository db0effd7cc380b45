"""Local steps: a client makes so many steps in place of an epoch, whatever its number of samples.

The batches are those of `core.batches.plan_of_steps`. They follow from the steps that the client has made, which
are in its record: so a client that missed rounds, or whose upload the server did not count, goes on where its own
pass over its samples stopped.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from copfl.core import AnyAlgorithm, ClientOutput, Data, Plan, Task
from copfl.core.algorithm import traits
from copfl.errors import UsageError
from copfl.wrappers.base import Wrapper


class StepsClient(NamedTuple):
    client: Any
    done: Tensor  # [] int64, the steps of all local updates


@dataclass(frozen=True)
class LocalSteps(Wrapper):
    """The algorithm, an epoch of which is `local_steps` steps of the client."""

    local_steps: int = 1

    wraps: ClassVar[tuple[str, ...]] = ("client",)

    def client_init(self, task: Task) -> StepsClient:
        none = torch.zeros((), dtype=torch.int64, device=task.device)
        return StepsClient(self.algorithm.client_init(task), none)

    def client_update(
        self, task: Task, client: StepsClient, down: Any, data: Data, plan: Plan
    ) -> ClientOutput:
        output = self.algorithm.client_update(task, client.client, down, data, plan)
        done = client.done + self.total_epochs * self.local_steps
        return output._replace(client=StepsClient(output.client, done))

    def steps_done(self, client: StepsClient) -> Tensor:
        return client.done


def with_local_steps(algorithm: AnyAlgorithm, steps: int) -> AnyAlgorithm:
    """The algorithm with local steps; unchanged with 0, where an epoch is a pass over the client's samples.

    Args:
        algorithm: One without other wrappers: they go around this one.
        steps: In place of an epoch.
    """
    if not steps:
        return algorithm
    if traits(algorithm).optimizer is None:
        raise UsageError(
            f"run.steps={steps} has no effect: {type(algorithm).__name__.lower()} makes no training steps; "
            "leave it out, or choose an algorithm that does"
        )
    return LocalSteps(algorithm, steps)
