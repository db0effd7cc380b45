"""FedSA-LoRA (Guo et al. 2025): of each adapter's B A, A is shared, and B stays with the client."""

from dataclasses import dataclass

from copfl.core import Task
from copfl.parts.adapters import A, B, check
from copfl.parts.averaging import PartlyPersonal


@dataclass(frozen=True)
class FedSALoRA(PartlyPersonal):
    """FedAvg of A and of what else is trained; B and the head are personal, and all are trained."""

    # Paper: it describes A and B. The head is personal as in the released program's configuration;
    # personal=("*.lora_B",) shares it.
    personal: tuple[str, ...] = (B, "head")  # type: ignore[misc]

    needs = (A, B)

    def parts(self, task: Task) -> tuple[str, ...]:
        check(task, "fedsa_lora", self.needs)
        return self.personal
