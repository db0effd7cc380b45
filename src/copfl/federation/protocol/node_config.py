"""What a node's owner set: read and checked once, from the options of a command or of Flower. Without torch.

The door (`node.respond`) parses it for each message; from there on it is a field of the `Node`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copfl.errors import UsageError, raised_as
from copfl.federation.policy.record import FINGERPRINT

WORKER = ".worker"  # the worker's folder in the state-dir; the name of a run begins with no dot
MEMORY = ".secure"  # the folder of what the node remembers of its data, over all runs


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node's owner set, with every default."""

    state_dir: Path  # the folder of all that the node keeps
    key: Path  # the file of its private key, which is made on first use
    client: int = -1  # its number; -1: the proposal or the server assigns one
    coordinator: str = ""  # the fingerprint of the one whose proposals it accepts, beside the policy's
    policy: Path | None = None  # the file; None: the one in the state-dir, if there is one
    data: str = ""  # a table, an .npz file, a folder, or module:function
    test: Path | None = None  # test rows of a table; None: some of its rows
    device: str = "cpu"
    threads: int = 1  # of torch
    worker: bool = True  # whether another process, which stays, answers
    memory: float = 4.0  # GiB: a worker that has more after an answer ends
    bundle: bool = True  # whether the model is written as a bundle
    metrics: bool | None = None  # whether metrics are sent; None: unless uploads are noised
    cohort_changes: int = 0  # how often the members of secure sums, or the rows that train, may change
    options: Mapping[str, Any] = field(default_factory=dict)  # as they were set, for a data function too

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "NodeConfig":
        """The record of what was set, by key; UsageError names a key that is missing or of another type."""
        state, key = state_dir(options), options.get("key")
        if key is not None and (not isinstance(key, str) or not key):
            raise UsageError("key must be the path of the node's private key")
        client = options.get("client", cls.client)
        if type(client) is not int:
            raise UsageError(f"client={client!r} must be a whole number, such as client=3")
        policy, test = options.get("policy"), options.get("test")
        if policy is not None and not isinstance(policy, str):
            raise UsageError("policy must be the path of a file")
        if test is not None and not isinstance(test, str):
            raise UsageError("test must be the path of a file with test rows")
        coordinator = options.get("coordinator")
        if coordinator is not None and not (
            isinstance(coordinator, str) and FINGERPRINT.fullmatch(coordinator)
        ):
            raise UsageError(
                "coordinator must be the fingerprint of a key, as `copfl federate members` prints it"
            )
        changes = options.get("cohort-changes", cls.cohort_changes)
        if type(changes) is not int or changes < 0:
            raise UsageError(
                f"cohort-changes={changes!r} must be a whole number: how often the cohort may change"
            )
        with raised_as(UsageError, "threads and memory must be numbers: {}", ValueError, TypeError):
            threads, memory = (
                int(options.get("threads", cls.threads)),
                float(options.get("memory", cls.memory)),
            )
        data, metrics = options.get("data"), options.get("metrics")
        return cls(
            state_dir=state,
            key=Path(key).expanduser() if key else state / MEMORY / "member.key",
            client=client,
            coordinator=coordinator or "",
            policy=Path(policy).expanduser() if policy else None,
            data=data if isinstance(data, str) else "",
            test=None if test is None else Path(test).expanduser(),
            device=str(options.get("device", cls.device)),
            threads=threads,
            worker=bool(options.get("worker", cls.worker)),
            memory=memory,
            bundle=bool(options.get("bundle", cls.bundle)),
            metrics=None if metrics is None else bool(metrics),
            cohort_changes=changes,
            options=dict(options),
        )

    @property
    def private_texts(self) -> list[str]:
        """What was set, paths of this machine among it: no text for other machines has them."""
        return [str(value) for value in self.options.values()]


def state_dir(options: Mapping[str, Any]) -> Path:
    """The folder that a node's owner named for its state; UsageError if there is none."""
    path = options.get("state-dir")
    if not isinstance(path, str) or not path:
        raise UsageError("""the node has no folder for its state; set --node-config 'state-dir="..." ...'""")
    return Path(path).expanduser()
