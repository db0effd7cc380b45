"""The settings of the table [run], and the device by its name."""

from dataclasses import dataclass

import torch

from copfl.core.batches import participants, split_new
from copfl.core.evaluation import EVAL_MODELS
from copfl.engine.rounds import Ids
from copfl.errors import UsageError, below_one, fraction_of, how_to_set, one_of, raised_as

CHOICES = {
    "engine": ("auto", "sequential", "vmap", "cuda_graph"),
    "eval_models": tuple(EVAL_MODELS),
    "store": ("memory", "disk"),
    "mkldnn": ("auto", "on", "off"),
    "cache_features": ("auto", "on", "off"),
    # In tf32 and bf16 only the matrix products are short; "auto" is tf32 on a GPU and fp32 elsewhere. Beside
    # frozen parameters, bf16 on a GPU shortens the activations too; what is trained stays fp32.
    "precision": ("auto", "fp32", "tf32", "bf16", "fp64"),
}
LIMITS = {  # the least and the most of each number
    "clients": (1, 10**7),
    "rounds": (1, 10**9),
    "batch": (1, 10**9),
    "eval_every": (1, 10**9),
    "checkpoint_every": (1, 10**9),
    "threads": (1, 1024),
    "workers": (0, 1024),
    "chunk": (0, 10**9),
}


@dataclass(frozen=True)
class RunSettings:
    """The table [run]."""

    clients: int = 10
    rounds: int = 100
    seed: int = 0
    batch: int = 32
    participation: float = 1.0
    new_clients: float = 0.0  # fraction of the clients that never train, and are fitted after the last round
    eval_every: int = 1  # rounds between evaluations
    eval_models: str = "all"  # "personal": without the global model; "final": only after local training
    checkpoint_every: int = 10
    buffers: str = "local"
    augment: bool = True  # random crops and flips of images, on data sets that have them; False: none
    device: str = "cpu"
    engine: str = "auto"
    chunk: int = 0  # clients in one batch; 0: the engine's choice
    precision: str = "auto"
    threads: int = 1
    workers: int = 1  # processes that train clients, on a CPU; 0: the fastest number by a short measurement
    store: str = "memory"  # where client states are between rounds: "memory", or "disk" for many clients
    mkldnn: str = "auto"  # kernels of a CPU: "on", "off", or the faster by a short measurement
    # The outputs of a frozen front, computed once: "on", "off", or where they take little memory.
    cache_features: str = "auto"
    local_baseline: bool = False  # train each client alone as well, on the same batches; see gains.json
    save_models: bool = True  # whether every client's personal model is written when the run ends

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if not low <= (value := getattr(self, name)) <= high:
                automatic = "; 0 is automatic" if low == 0 else ""
                raise UsageError(f"{name}={value} must be at least {low} and at most {high:,}{automatic}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} must be at least 0 and below 2^63")
        fraction_of("the clients", participation=self.participation)
        below_one(new_clients=self.new_clients)
        if self.new_clients and self.clients < 2:
            needed = "needs at least two clients, and one of them trains"
            raise UsageError(f"new_clients={self.new_clients} {needed}")
        for name, known in CHOICES.items():
            one_of(known, **{name: getattr(self, name)})

    @property
    def participants(self) -> int:
        """The number of clients in each round."""
        return participants(len(self.split_clients[0]), self.participation)

    @property
    def split_clients(self) -> tuple[Ids, Ids]:
        """The clients that train, and the new ones."""
        return split_new(self.seed, self.clients, self.new_clients)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def precision_on(self, device: torch.device) -> str:
        """The precision, with "auto" decided, set up in torch."""
        usual = "tf32" if device.type == "cuda" else "fp32"
        precision = usual if self.precision == "auto" else self.precision
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        return precision


def device_of(name: str) -> torch.device:
    """The device by its name, if this machine has it; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with raised_as(UsageError, f'device "{name}" is unknown; use cpu, cuda, cuda:N or auto', RuntimeError):
        device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f'device "{name}" is not supported; use cpu, cuda, cuda:N or auto')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        cpu = how_to_set("run.device", "cpu", "--device")
        raise UsageError(f'device "{name}" needs a CUDA GPU and a CUDA build of PyTorch; use {cpu}')
    return device
