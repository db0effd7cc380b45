"""FFA-LoRA (Sun et al. 2024): of each adapter's B A, A keeps its initial value and B is averaged."""

from dataclasses import dataclass

from copfl.core import ClientOutput, Data, Plan, Task
from copfl.parts.adapters import A, B, check
from copfl.parts.averaging import Client, Down, PartlyPersonal


@dataclass(frozen=True)
class FFALoRA(PartlyPersonal):
    """FedAvg of everything but A, which no client trains and nobody sends.

    With one A for all, the mean of the products B A is the product of the means. `personal` names parts that
    stay with the client besides, such as the head.
    """

    # Paper: the head is shared, as here; personal=("head",) keeps one at each client.
    personal: tuple[str, ...] = ()  # type: ignore[misc]

    needs = (A, B)
    fine_tuned = True

    def parts(self, task: Task) -> tuple[str, ...]:
        check(task, "ffa_lora", self.needs)
        return (A, *self.personal)  # the same initial A everywhere: it is never sent

    def client_update(self, task: Task, client: Client, down: Down, data: Data, plan: Plan) -> ClientOutput:
        w, active = self.global_model(task, client, down), ~task.where(A)[: task.d]
        return self.output(task, self.fit(task, w, client.moments, data, plan, active=active), data)
