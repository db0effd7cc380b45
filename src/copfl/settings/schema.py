"""The complete description of a run as typed, frozen records.

A record is a table of run.toml, a field a key. A field has its type, default, limits, and a sentence of help;
with names such as "--lr" it is an option of the command line, too. The options of a component (an algorithm,
a model, ...) are the fields of its dataclass or the keywords of its function, and are in `options`.

Nothing here imports torch, so that `copfl --help` is fast.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from copfl.errors import UsageError
from copfl.settings.checking import SettingError, converted, unknown_key
from copfl.settings.policy_lines import (
    HASH_OF_CODE,
    AdapterName,
    AtMost,
    ComponentName,
    FileName,
    Free,
    FunctionNames,
    ListedOption,
    ModelPart,
    NumbersAtMost,
    Option,
    PolicyLine,
    Simulated,
)
from copfl.settings.record import ALL, Component, checked_fields, declared, declared_types, setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EVAL_MODELS = ("all", "personal", "final")
SWITCH = ("auto", "on", "off")
COMPARISONS = "compare sweep choose"  # the commands that train many runs
SELECTION = 0.2  # of each client's training samples, for the choice of its round
# A setting whose option is in this panel of the help.
in_data, in_model, in_training = (partial(setting, panel=panel) for panel in ("Data", "Model", "Training"))
in_federation, in_robustness = (partial(setting, panel=panel) for panel in ("Federation", "Robustness"))
# How a run is computed and what is kept of it: runs that differ in nothing else are the same one.
how = partial(setting, same_run=ALL)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Component):
    """[algorithm]: the method of federated learning."""

    name: str = in_training(
        "",
        "An algorithm (`copfl list algorithms`) or module:Class; modules are searched in the current folder "
        "too.",
        "--algorithm -a",
        shown="what suits the data",
        not_in="compare choose",
        policy=ComponentName("algorithms"),
    )
    epochs: int | None = in_training(
        None, "Local epochs per round.", "--epochs", shown="1", minimum=0, policy=AtMost("bounds.epochs")
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer(Component):
    """[optimizer]: the rule of the local steps."""

    name: str = in_training(
        "",
        "sgd, adam, mamo or module:Class.",
        "--optimizer",
        shown="the algorithm's",
        policy=ComponentName("optimizers"),
    )
    lr: float | None = in_training(
        None,
        "Learning rate.",
        "--lr",
        shown="what suits the optimizer and the data",
        exclusiveMinimum=0,
        policy=Option(),
    )


OPTIONS_OF_LOSSES = ("delta", "class_weights", "label_smoothing", "ties", "cuts")


@dataclass(frozen=True, kw_only=True)
class Data(Component):
    """[data]: the samples."""

    name: str = in_data(
        "", "A name, file, folder, hf:NAME or module:function.", "--dataset -d", shown="digits"
    )
    dir: str | None = in_data(
        None, "Folder of the data sets.", "--data-dir", ours=True, shown="$COPFL_DATA", same_run=ALL
    )
    target: str | None = in_data(None, "The column of a table to predict; several with commas.", "--target")
    client: str | None = in_data(None, "The column that names the client.", "--client")
    text: str | None = in_data(None, "The column of texts to learn from.", "--text")
    group: str | None = in_data(
        None,
        "The column of a table that says what of a site belongs together, on one side of every split.",
        "--group",
    )
    time: str | None = in_data(
        None, "The column of a table that says when: the later rows of each client are test.", "--time"
    )
    split: int | None = in_data(
        None, "Seed of the draw of a table's test rows.", "--split", minimum=0, shown="0"
    )
    kind: str | None = in_data(
        None,
        "classification, multilabel, regression, next_token or survival.",
        "--task",
        shown="by the targets",
    )
    event: str | None = in_data(
        None,
        "Of survival, the column that says whether the event was seen at the time in the target (1) or not (0).",
        "--event",
    )
    start: str | None = in_data(
        None,
        "Of survival, the column of the time after which a row is at risk: of patients who entered late, or have "
        "several rows.",
        "--start",
    )
    skip_corrupt: bool | None = in_data(None, "Leave out damaged images of a folder.", "--skip-corrupt")


@dataclass(frozen=True, kw_only=True)
class Partition(Component):
    """[partition]: which client has which samples."""

    name: str = in_data(
        "",
        "Of `copfl list partitions`, a file of a run, or module:function.",
        "--partition",
        shown="by_group where the data has clients, else classes",
    )


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """[model]: the network, and what of it is trained."""

    name: str = in_model(
        "",
        "A name, module:Class, hf:FOLDER, torchvision:NAME or timm:NAME.",
        "--model -m",
        shown="by the samples",
        policy=ModelPart("name"),
    )
    weights: str | None = in_model(
        None,
        "Of a pretrained model: default, none or a file.",
        "--weights",
        shown="default",
        policy=ModelPart("weights"),
    )
    train: str | None = in_model(
        None,
        "Parameters to train: parts or patterns, as head,*.bias.",
        "--train",
        ours=True,
        shown="all",
        policy=Option(),
    )
    freeze: str | None = in_model(
        None,
        "Parameters to keep as they are, as body or *.lora_A*.",
        "--freeze",
        ours=True,
        shown="none",
        policy=Option(),
    )
    head: str | None = setting(
        None, "The name of the last layer, if it is not the last of the module.", ours=True, policy=Option()
    )
    frozen_dropout: bool | None = setting(
        None, "Whether frozen layers have their dropout.", ours=True, policy=Option()
    )
    tokenizer: str | None = setting(None, "Folder of the tokenizer.", ours=True, policy=FileName("tokenizer"))
    max_length: int | None = setting(
        None, "Tokens of a text at most; 0: no limit.", ours=True, minimum=0, policy=Option()
    )
    sha256: str | None = setting(
        None, "Of the pretrained base; another one is refused.", ours=True, policy=ModelPart("sha256")
    )


@dataclass(frozen=True, kw_only=True)
class Adapter(Component):
    """[adapter]: low-rank matrices beside the layers of a model."""

    name: str = in_model(
        "",
        "lora, or lora:r=8,alpha=16,targets=query+value.",
        "--adapter",
        shown="none",
        policy=AdapterName(),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """[task]: the objective and the metrics."""

    of_options: ClassVar[PolicyLine] = Option()  # an unknown key is refused with the nearest known one, later

    loss: str | None = in_training(
        None,
        "squared, absolute or huber; of survival cox or discrete_time; or module:function.",
        "--objective",
        shown="by the targets",
        policy=FunctionNames("losses"),
    )
    metrics: tuple[str, ...] = in_training(
        (),
        "Metrics, the first is primary, as auc,accuracy.",
        "--metrics",
        shown="by the targets",
        policy=FunctionNames("metrics"),
    )
    delta: float | None = setting(None, "Where the Huber loss becomes linear.", policy=Option())
    class_weights: tuple[float, ...] = setting(
        (), "The weight of each class, or of each label.", policy=Option()
    )
    label_smoothing: float | None = setting(
        None, "The probability that is given to all classes alike.", policy=Option()
    )
    ties: str | None = setting(
        None,
        "Of events at the same time in Cox's likelihood: efron or breslow.",
        shown="efron",
        policy=Option(),
    )
    cuts: tuple[float, ...] = setting(
        (),
        "Of discrete_time, the ends of the intervals, in the unit of the times.",
        policy=NumbersAtMost("bounds.intervals"),
    )
    code: str | None = setting(
        None,
        "SHA-256 of the modules of functions of yours, when they were trained.",
        same_run=ALL,
        policy=HASH_OF_CODE,
    )

    def __bool__(self) -> bool:
        return self != Task()

    @property
    def options(self) -> dict[str, Any]:
        """The options of the objective."""
        own_options = {name: getattr(self, name) for name in OPTIONS_OF_LOSSES}
        return {name: value for name, value in own_options.items() if value not in (None, ())}


@dataclass(frozen=True, kw_only=True)
class Server(Component):
    """[server]: how far the server moves in the direction of the clients' mean update."""

    name: str = in_training(
        "",
        "The server's step: mean, momentum, adam, yogi, adagrad, fedexp or module:Class.",
        "--server",
        shown="mean where an algorithm is named, else what suits the data",
        policy=ComponentName("servers"),
    )


@dataclass(frozen=True, kw_only=True)
class Addons(Component):
    """[addons]: what can be added to every algorithm."""

    of_options: ClassVar[PolicyLine] = ListedOption("addons")


@dataclass(frozen=True, kw_only=True)
class Robust(Component):
    """[robust]: aggregation against malicious clients."""

    name: str = in_robustness(
        "",
        "Robust aggregation: clip, evidence, trimmed_mean, median or module:Class.",
        "--robust",
        shown="none",
        policy=ComponentName("robust"),
    )


@dataclass(frozen=True, kw_only=True)
class Privacy(Component):
    """[privacy]: clipped and noised uploads."""

    of_options: ClassVar[Mapping[str, PolicyLine]] = {"clip": AtMost("privacy.clip"), "delta": AtMost(1)}

    noise: float | None = in_robustness(
        None,
        "Clip the uploads and add noise to their sum, in multiples of privacy.clip.",
        "--privacy",
        shown="none",
        policy=AtMost("bounds.option", line="privacy.noise"),
    )
    # Without a policy line: no name of this table is a user's.
    code: str | None = setting(
        None, "Folder of the module of a name such as mymodule:MyNet.", ours=True, same_run=ALL
    )


@dataclass(frozen=True, kw_only=True)
class Attack(Component):
    """[attack]: simulated malicious clients."""

    name: str = in_robustness(
        "",
        "Simulated attack: label_flip, sign_flip, scaled, noise or free_rider.",
        "--attack",
        shown="none",
        not_in="init",
        policy=Simulated("is simulated, and a federation is not; leave it out", unless=("",)),
    )
    fraction: float | None = in_robustness(
        None, "Fraction of malicious clients.", "--attackers", shown="0.2", not_in="init"
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """[run]: the federation's size, the rounds, and how they are computed."""

    clients: int = in_federation(
        10,
        "Number of clients.",
        "--clients -n",
        minimum=1,
        maximum=10**7,
        shown="the natural clients of the data, else 10",
        policy=AtMost("bounds.clients"),
    )
    rounds: int = in_federation(
        100,
        "Number of rounds.",
        "--rounds -r",
        minimum=1,
        maximum=10**9,
        shown="found on your own data (run.find_rounds); 40 on digits, else 100",
        policy=AtMost("bounds.rounds"),
    )
    seed: int = in_training(
        0,
        "Seed of all randomness.",
        "--seed",
        minimum=0,
        maximum=2**63 - 1,
        not_in=COMPARISONS,
        policy=Free(),
    )
    batch: int = in_training(
        32,
        "Samples per training step.",
        "--batch-size",
        minimum=1,
        maximum=10**9,
        shown="8 or 32, by the samples of a client; 32 on published sets with a named algorithm",
        policy=AtMost("bounds.batch"),
    )
    steps: int = in_training(
        0,
        "Training steps of a client in place of each local epoch, whatever its number of samples; 0: an epoch is "
        "one pass over them.",
        "--steps",
        minimum=0,
        maximum=10**6,
        policy=AtMost("bounds.steps"),
    )
    even_batches: bool = setting(
        False,
        "Whether all batches of a pass have the same size but for one sample, so that none is of what is left; in "
        "secure sums a last batch of one sample would tell it.",
        shown="on with secure sums",
        policy=Free("secure_aggregation.even_batches"),
    )
    participation: float = in_federation(
        1.0,
        "Fraction of the clients in each round.",
        "--participation",
        exclusiveMinimum=0,
        maximum=1,
        policy=Free(),
    )
    new_clients: float = in_federation(
        0.0,
        "Fraction of the clients that never train, and are fitted after the last round.",
        "--new-clients",
        minimum=0,
        exclusiveMaximum=1,
        not_in="init",
        same_run=(0.0,),
        policy=Simulated(
            "is for the simulation, which keeps a fraction of its clients out of the training; here a new client "
            "joins after it: `copfl federate personalize FOLDER --data FILE`, or session.join=3 in a run",
            unless=(0.0,),
        ),
    )
    eval_every: int = setting(1, "Rounds between evaluations.", minimum=1, maximum=10**9, policy=Free())
    eval_models: str = how(
        "all",
        "Which models are evaluated; personal: without the global model; final: only after local training.",
        enum=EVAL_MODELS,
    )
    validation: float = in_federation(
        0.0,
        "Fraction of each client's training samples that nobody trains on, for a validation score.",
        "--validation",
        minimum=0,
        exclusiveMaximum=1,
        shown=f"{SELECTION} with --select best",
        not_in=COMPARISONS,
        same_run=(0.0,),
        policy=AtMost(0.5),  # an upload that was trained on a few samples would reveal them
    )
    select: str = in_federation(
        "last",
        "Each client's model: of its last evaluation, or of the best one on its validation samples.",
        "--select",
        enum=("last", "best"),
        same_run=("last",),
        policy=Free(),
    )
    patience: int = in_federation(
        0,
        "With --select best: end the run after so many evaluations in which no client improved; 0: never.",
        "--patience",
        minimum=0,
        maximum=10**9,
        not_in=f"{COMPARISONS} init",
        same_run=(0,),
        comparable=(0,),
        policy=Simulated(
            "ends a simulation by the validation scores of all clients, which nodes do not send; leave it out",
            unless=(0,),
        ),
    )
    find_rounds: str = how(
        "off",
        "first: find the number of rounds, run.rounds at most, with a part of each client's training samples held "
        "out, then train on all of them; done: run.rounds was found so; auto: first on own data where neither "
        "run.rounds nor validation samples are set, else off.",
        enum=("off", "auto", "first", "done"),
        shown="auto in `copfl run`",
        comparable=("off", "done"),
        policy=Simulated(
            "needs the losses of all clients in every round, which nodes do not send; name run.rounds",
            unless=("off", "done"),
        ),
    )
    temperature: float = setting(
        1.0,
        "Of the probabilities of a client without validation samples: above 1 they become less sure. "
        "run.find_rounds finds it on held-out samples.",
        minimum=1e-3,
        maximum=1e3,
        same_run=(1.0,),
        policy=Free(),
    )
    rounds_alone: int = how(
        0,
        "Rounds of the training alone, see run.local_baseline; 0: those of the run.",
        minimum=0,
        maximum=10**9,
    )
    checkpoint_every: int = how(10, "Rounds between checkpoints.", minimum=1, maximum=10**9)
    buffers: str = setting(
        "local", "Batch-norm statistics: local, or average.", enum=("local", "average"), policy=Free()
    )
    augment: bool = setting(
        True, "Random crops and flips of images, on data sets that have them.", policy=Free()
    )
    device: str = in_training(
        "auto",
        "cpu, cuda, cuda:N or auto; auto is a GPU if there is one and it is faster.",
        "--device",
        not_in="init",
        same_run=ALL,
    )
    engine: str = in_training(
        "auto",
        "auto, sequential, vmap or cuda_graph; auto is the fastest.",
        "--engine",
        enum=("auto", "sequential", "vmap", "cuda_graph"),
        not_in="init",
        same_run=ALL,
    )
    chunk: int = how(0, "Clients in one batch; 0: the engine's choice.", minimum=0, maximum=10**9)
    # In tf32 and bf16 only the matrix products are short. Beside frozen parameters, bf16 on a GPU shortens
    # the activations too; what is trained stays fp32.
    precision: str = in_training(
        "auto",
        "auto, fp32, tf32, bf16 or fp64; auto is tf32 on a GPU and fp32 elsewhere.",
        "--precision",
        enum=("auto", "fp32", "tf32", "bf16", "fp64"),
        not_in="init",
        same_run=("auto", "fp32", "tf32"),  # each device has its own
        policy=Simulated("must be fp32: nodes train in single precision", unless=("auto", "fp32")),
    )
    threads: int = how(1, "Threads of torch on a CPU.", minimum=1, maximum=1024)
    workers: int = in_training(
        1,
        "Processes on a CPU: for clients, and in a first run for what each has alone; 0: the fastest number.",
        "--workers",
        minimum=0,
        maximum=1024,
        shown="0 in `copfl run`, 1 elsewhere",
        not_in="init",
        same_run=ALL,
    )
    store: str = in_federation(
        "memory",
        "Where client states are between rounds: memory, or disk for many clients.",
        "--store",
        enum=("memory", "disk"),
        not_in="init",
        same_run=ALL,
    )
    cache_features: str = how(
        "auto",
        "The outputs of a frozen front, computed once; auto: where they take little memory.",
        enum=SWITCH,
    )
    local_baseline: bool = in_training(
        False,
        "Train each client alone as well, on the same batches.",
        "--local-baseline/--no-local-baseline",
        shown="on in `copfl run`",
        not_in=f"{COMPARISONS} init",
        same_run=ALL,
    )
    rivals: bool = in_training(
        True,
        "Train scikit-learn's usual models at each client alone as well, to compare; not on images.",
        "--rivals/--no-rivals",
        not_in="sweep init",
        same_run=ALL,
    )
    own_models: str = setting(
        "",
        "Clients that keep a model of scikit-learn that they train alone, in place of the federation's: a kind for "
        "all, such as forest, or each with its number, such as 3:forest,5:constant. The model has to be trees.",
        shown="in `copfl run` on a table, those for which it is better by two standard errors, given all clients",
    )
    benefit: bool = in_federation(
        False,
        "Measure what each client is worth to the others, from random halves of the uploads.",
        "--benefit",
        same_run=ALL,
        policy=Free("benefit"),
    )
    save_models: bool = how(True, "Write every client's personal model when the run ends.")

    def __post_init__(self) -> None:
        checked_fields(self, "run")
        if self.patience and self.select != "best":
            raise UsageError(
                f"run.patience={self.patience} is the number of evaluations without a better one on "
                'validation samples; it needs run.select="best" (--select best)'
            )
        if self.select == "best" and not self.validation:
            object.__setattr__(self, "validation", SELECTION)
        if self.new_clients and self.clients < 2:
            needed = "needs at least two clients, and one of them trains"
            raise UsageError(f"run.new_clients={self.new_clients} {needed}")

    @property
    def split_clients(self) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """The clients that train, and the new ones."""
        from copfl.core.batches import split_new

        return split_new(self.seed, self.clients, self.new_clients)

    @property
    def participants(self) -> int:
        """The number of clients in each round."""
        from copfl.core.batches import participants

        return participants(len(self.split_clients[0]), self.participation)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: what is trained, on which data, how. `copfl.complete` fills in what is not given.

    Args:
        algorithm: The method of federated learning.
        optimizer: The rule of the local steps.
        data: The samples.
        partition: Which client has which samples.
        model: The network, and what of it is trained.
        adapter: Low-rank matrices beside the layers of a model.
        task: The objective and the metrics.
        server: How far the server moves in the direction of the clients' mean update.
        addons: What can be added to every algorithm.
        robust: Aggregation against malicious clients.
        privacy: Clipped and noised uploads.
        attack: Simulated malicious clients.
        run: The federation's size, the rounds, and how they are computed.
    """

    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    partition: Partition = field(default_factory=Partition)
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    task: Task = field(default_factory=Task)
    server: Server = field(default_factory=Server)
    addons: Addons = field(default_factory=Addons)
    robust: Robust = field(default_factory=Robust)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        """A name or a mapping in place of a record becomes one: Run(algorithm="fedper")."""
        for title, kind in KINDS.items():
            chosen = getattr(self, title)
            if isinstance(chosen, str):
                chosen = {"name": chosen}
            if isinstance(chosen, Mapping):
                object.__setattr__(self, title, record_of(title, chosen))
            elif not isinstance(chosen, kind):
                raise SettingError(
                    title, chosen, f"must be a name, a mapping or a copfl.settings.schema.{kind.__name__}"
                )

    def __repr__(self) -> str:
        """A line; the 90 settings of a complete record are in `tables()`."""
        if not self.is_complete:
            return f"Run.of({self.chosen})"
        return (
            f"Run of {self.method_text} on {self.data.title}: {self.partition_text}, {self.run.rounds} rounds"
        )

    @classmethod
    def of(cls, tables: Mapping[str, Mapping[str, Any]]) -> Self:
        """The record of a mapping; the options of components stay unchecked.

        Args:
            tables: By title and key, such as the content of run.toml.
        """
        for title, table in tables.items():
            if title not in KINDS:
                raise unknown_key(title, dict(table), KINDS)
        return cls(**{title: record_of(title, table) for title, table in tables.items()})

    def replaced(self, layer: Mapping[str, Mapping[str, Any]]) -> Self:
        """The record with other values of some keys; the options of components stay unchecked.

        Args:
            layer: The other values, by title and key.
        """
        tables = self.tables()
        values = {
            title: getattr(self, title).value
            for title in self.__dict__
            if isinstance(getattr(self, title), Component)
        }
        other = self.of(
            tables | {title: {**tables.get(title, {}), **table} for title, table in layer.items()}
        )
        same = {
            title: dataclasses.replace(getattr(other, title), value=value) for title, value in values.items()
        }
        return dataclasses.replace(other, **same)

    @property
    def is_complete(self) -> bool:
        """Whether `copfl.complete` made the record, or somebody who chose as much."""
        return all(chosen.title for chosen in (self.algorithm, self.data, self.partition, self.model))

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """What is chosen, by title and key: of [run] in a record that is not complete, what is no default."""
        tables = self.tables()
        if not self.is_complete:
            usual = table_of(RunSettings())
            tables["run"] = {key: value for key, value in tables["run"].items() if value != usual[key]}
        return tables

    @property
    def values(self) -> dict[str, Any]:
        """By kind, the values that a program passed."""
        records = {title: getattr(record, "value", None) for title, record in vars(self).items()}
        return {title: value for title, value in records.items() if value is not None}

    @property
    def method_text(self) -> str:
        """Such as "fedpac (server step fedexp, adam 0.003, batches of 8, 4 epochs)"."""
        optimizer = (
            f"{self.optimizer.title} {self.optimizer.lr:g}" if self.optimizer.lr else self.optimizer.title
        )
        step = [f"server step {self.server.title}"] if self.server else []
        schedule = self.addons.options.get("lr_schedule", "constant")
        addons = [f"{schedule} schedule"] if schedule != "constant" else []
        if self.addons.options.get("ema"):
            addons.append("averaged weights")
        epochs = [f"{self.algorithm.epochs} epochs"] if (self.algorithm.epochs or 1) > 1 else []
        batches = (
            [optimizer, f"batches of {self.run.batch}"] if optimizer else []
        )  # else nothing is trained by steps
        steps = [f"{self.run.steps} steps in place of an epoch"] if self.run.steps else []
        words = [*step, *batches, *epochs, *steps, *addons]
        return f"{self.algorithm.title} ({', '.join(words)})" if words else self.algorithm.title

    @property
    def partition_text(self) -> str:
        """Such as "10 clients, partition classes (per_client=2)", or "(natural clients)" of by_group."""
        chosen = self.partition
        clients = f"{self.run.clients} client{'s' * (self.run.clients != 1)}"
        if chosen.description:
            return f"{clients}, {chosen.description}"
        shown = [f"{key}={value}" for key, value in chosen.options.items() if value is not False]
        shown += ["natural clients"] if chosen.name == "by_group" else []
        in_brackets = f" ({', '.join(shown)})" if shown else ""
        return f"{clients}, partition {chosen.name}{in_brackets}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """The content of run.toml: plain names and numbers, without what is not chosen."""
        return {title: table for title, record in vars(self).items() if (table := table_of(record))}


KINDS: dict[str, type[Any]] = {f.name: f.default_factory for f in dataclasses.fields(Run)}  # type: ignore[misc]


def record_of(title: str, table: Mapping[str, Any]) -> Any:
    """The record of a table, whose declared keys are checked.

    Args:
        title: Of the table.
        table: As it was set.
    """
    record, known = KINDS[title], declared_types(KINDS[title])
    fields = {k: converted(f"{title}.{k}", v, *known[k]) for k, v in table.items() if k in known}
    rest = {k: v for k, v in table.items() if k not in known and k != "value"}
    if issubclass(record, Component):
        return record(**fields, options=rest, description=str(table.get("value", "")))
    for key, value in rest.items():
        raise unknown_key(f"{title}.{key}", value, known, paths())
    return record(**fields)


def table_of(record: Any) -> dict[str, Any]:
    """The table of a record, without what is not set."""
    known = {f.name: getattr(record, f.name) for f in declared(type(record))}
    table = {k: v for k, v in known.items() if v is not None and v not in ("", ())} if record else {}
    if isinstance(record, Component):
        code = {"code": table.pop("code")} if "code" in table else {}  # last: a hash is of little interest
        table |= {k: v for k, v in record.options.items() if v is not None} | code
        table |= {"value": record.description} if record.description else {}
    return table if not isinstance(record, RunSettings) else known


@cache
def paths() -> tuple[str, ...]:
    """Every declared setting, such as "run.rounds"."""
    return tuple(f"{title}.{f.name}" for title, record in KINDS.items() for f in declared(record))


def optimizer_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Such as "adam 0.001", the optimizer and its learning rate; "" where an algorithm was a value."""
    table = tables.get("optimizer", {})
    return f"{table['name']} {table['lr']:g}" if "name" in table and "lr" in table else ""
