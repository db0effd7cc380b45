"""Names that a policy can allow: those of copfl's registries as texts, as these need torch. A test compares both."""

from typing import Any

from copfl.measures import metrics

SOURCES = ("hf", "torchvision", "timm")  # prefixes of pretrained models
ALGORITHMS = (
    "apfl",
    "copfl",
    "ditto",
    "fedala",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedbn",
    "fedcalm",
    "fedce",
    "feddbe",
    "feddpa",
    "fedex_lora",
    "fedpac",
    "fedper",
    "fedpoe",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedsa_lora",
    "fedselect",
    "ffa_lora",
    "flex_lora",
    "gpfl",
    "ifca",
    "knn_per",
    "ktpfl",
    "levels",
    "lg_fedavg",
    "local",
    "mr_mtl",
    "perfedavg",
    "pfedme",
    "player_fl",
    "potara",
    "reads",
    "scaffold",
    "splitnn",
    "trees",
    "wide_levels",
)
MODELS = ("causal_cnn", "cnn", "cnn1d", "embedding", "linear", "mlp", "resnet18", "trees", "words")
OPTIMIZERS = ("adam", "mamo", "sgd")
SERVERS = ("adagrad", "adam", "fedexp", "mean", "momentum", "yogi")
ADDONS: dict[str, Any] = {  # with the values that add nothing
    "bn_stats": "running",
    "ema": 0.0,
    "lr_rounds": 0,
    "lr_schedule": "constant",
}
# An average of the node's own weights never leaves it; a schedule can only lower the rate that the owner
# accepted.
USUAL_ADDONS = ("ema", "lr_rounds", "lr_schedule")
ROBUST = ("clip", "evidence", "median", "trimmed_mean")
ADAPTERS = ("lora",)
TASKS = ("classification", "multilabel", "next_token", "regression", "survival")
LOSSES = (
    "absolute",
    "binary_cross_entropy",
    "cox",
    "cross_entropy",
    "discrete_time",
    "huber",
    "squared",
)
METRICS = tuple(sorted(metrics.METRICS))
USUAL_LOSS = {
    "classification": "cross_entropy",
    "multilabel": "binary_cross_entropy",
    "next_token": "cross_entropy",
    "regression": "squared",
    "survival": "cox",
}
FILE_KEYS = ("public", "tokenizer", "weights")  # keys of a run config that name files
REPORTS = ("all", "sums", "none")
# Members of a proposal that need no approval by hand: those that the owner approved; the first list of a
# coordinator too, and from then on those in it; any.
MEMBERS = ("approved", "first", "any")
# Tables that choose a component or a function, in the order in which a refusal lists them.
COMPONENTS = ("algorithm", "optimizer", "model", "adapter", "server", "addons", "robust", "task")
