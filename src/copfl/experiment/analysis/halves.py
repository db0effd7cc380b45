"""Whether halves of the uploads of a run can be compared.

`prepare` asks before a run, and a server before it proposes one.
"""

from copfl.core.algorithm import AnyAlgorithm, ClientOutput
from copfl.core.halves import LEAST, not_a_mean
from copfl.core.task import Task
from copfl.errors import UsageError, how_to_set
from copfl.settings.schema import Run


def check_benefit(run: Run, algorithm: AnyAlgorithm, task: Task, example: ClientOutput, clients: int) -> None:
    """A UsageError where halves of the uploads say nothing about what a client is worth to the others.

    Args:
        run: The settings.
        algorithm: With everything around it.
        task: What the clients learn.
        example: A local update.
        clients: How many there are.
    """
    if run.privacy:
        raise UsageError(
            "run.benefit=true releases more sums of the same uploads than [privacy] accounts for; leave out "
            "one of them"
        )
    if run.run.participants < LEAST:
        raise UsageError(
            f"run.benefit=true compares halves of at least {LEAST} clients in a round; here "
            f"{run.run.participants} take part"
        )
    if problem := not_a_mean(algorithm, task, example, clients):
        name = run.algorithm.title or "the algorithm"
        raise UsageError(
            f"run.benefit=true compares means of uploads, but with {name} {problem}; leave it out, or choose an "
            f"algorithm that averages, such as fedavg ({how_to_set('algorithm.name', 'fedavg', '--algorithm')})"
        )


def check_evidence(run: Run) -> None:
    """A UsageError where weights by evidence have none to decide by."""
    if run.robust.name == "evidence" and not run.run.benefit:
        raise UsageError(
            "robust.name=evidence decides by the benefit of each client to the others; add run.benefit=true "
            "(--benefit)"
        )
