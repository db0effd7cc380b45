"""A trained model from a folder: `copfl.load`.

What is stored is a bundle. The model before local training is not stored: the run is opened again for it, so this
module stands above both.
"""

from pathlib import Path
from typing import Any

from copfl.errors import UsageError
from copfl.experiment.bundle.bundle import Bundle, read_bundle
from copfl.settings import named_code


@named_code.scope()
def load(
    path: str | Path,
    client: int | str | None = None,
    *,
    before_training: bool = False,
    model: Any = None,
    code: named_code.Modules = (),
    **values: Any,
) -> Bundle:
    """The model in a bundle, of a node, or of one client in a run folder.

    Args:
        path: The folder of a bundle, of a run, or the state-dir of a node.
        client: In a run folder, a number from 0, or the client's name in the data; "global" is the global
            model.
        before_training: The model that the client has after the last aggregation, before it trains again, in
            place of the one that the table scores. It is made from the run's checkpoint and data, which must
            be there.
        model: An nn.Module or the function that makes it, where the run was given one.
        code: Modules of the author's code that the folder may name, such as "mypackage.nets". A bundle is data: no
            other code is imported.
        values: With `before_training`, what else a program passed to the run: `algorithm`, `data`.
    """
    named_code.name(code)
    if not before_training:
        return read_bundle(path, client, model)
    from copfl.experiment.finished import received_bundle  # only here: a stored model needs no data set

    if client is None:
        raise UsageError("name the client whose model before local training is wanted, in its run folder")
    return received_bundle(path, client, **({} if model is None else {"model": model}), **values)
