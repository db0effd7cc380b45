"""README.md of a bundle: the model card.

`writing` calls it for each bundle.
"""

import json

from copfl.experiment.bundle.description import IMAGE, TABLE, TEXT, Description, own_code
from copfl.measures.metrics import METRICS

MOST = 20  # names that are listed

USE = """```python
import copfl

bundle = copfl.load("{folder}")
bundle.predict({example})
```

```bash
copfl predict {folder} --data {file} --out predictions.csv
copfl evaluate {folder} --data {file}
```"""


def card(description: Description, folder: str, remembers_samples: bool = False) -> str:
    """What the model is, takes and returns, how good it is, and how it is used.

    Args:
        description: Of the bundle.
        folder: Its name, for the example.
        remembers_samples: Whether the weights have features of training samples.
    """
    origin, output = description.origin, description.output
    who = "The global model" if origin.client is None else f"The model of client {origin.client}"
    who += f" ({origin.name})" if origin.name and origin.name != str(origin.client) else ""
    lines = [
        "---",
        "library_name: copfl",
        f"datasets: [{json.dumps(origin.data)}]",
        f"metrics: [{', '.join(dict.fromkeys(score.metric for score in description.scores))}]",
        "tags: [federated-learning, personalised, copfl]",
        "---",
        "",
        f"# {who}: {origin.title}",
        "",
        f"- **Trained:** {origin.clients} clients, {origin.rounds} rounds, copfl {description.copfl}",
        f"- **State:** {origin.stage}{_round(description)}",
        f"- **Data:** {origin.data}{f'. {origin.note}' if origin.note else ''}",
        f"- **Takes:** {_input(description)}",
        f"- **Returns:** {output.kind}: "
        f"{_listed(output.names) if output.names else f'{output.count} tokens'}",
        *(f"- **{METRICS[s.metric].title if s.metric in METRICS else s.metric}:** {s.value:.4f} on "
          f"{s.samples:,} {s.split} samples of the client" for s in description.scores),
        f"- **Network:** {json.dumps(description.model, ensure_ascii=False)}",
        *([f"- **Adapter:** {json.dumps(description.adapter)}"] if description.adapter else []),
        *([f"- **Needs:** {', '.join(code)}, code of its author that is not in the bundle; name its module when the "
           f"model is opened: `--code {code[0].partition(':')[0]}`"]
          if (code := [*own_code(description.model), *own_code(description.task)]) else []),
        *(["- **Contains:** features of training samples, one by one. Keep it where the samples are"]
          if remembers_samples else []),
        *(["- **Contains:** the times of events of training samples, as steps of the baseline hazard. Keep it where "
           "the samples are"] if output.hazard is not None else []),
        "- **Licences** of the data, of the base and of this model: fill in",
        "",
    ]  # fmt: skip
    kind = description.input.kind
    examples = {TABLE: ("dataframe", "rows.csv"), TEXT: ('["a sentence"]', "sentences.txt")}
    example, file = examples.get(kind, ("images" if kind == IMAGE else "x", "x.npz"))
    return "\n".join([*lines, USE.format(folder=folder, example=example, file=file), ""])


def _round(description: Description) -> str:
    origin = description.origin
    if not origin.round:
        return ""
    validated = any(score.split == "validation" for score in description.scores)
    how = ", the best on the client's validation samples" if origin.select == "best" and validated else ""
    return f", round {origin.round} of {origin.rounds}{how}"


def _input(description: Description) -> str:
    given = description.input
    if given.kind == TABLE:
        return f"rows of the columns {_listed([column.name for column in given.columns])}"
    if given.kind == TEXT:
        return "texts"
    return ", ".join(f"{name}: {array.dtype} {list(array.shape)}" for name, array in given.arrays.items())


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:MOST]) + (f", ... ({len(names):,} in all)" if len(names) > MOST else "")
