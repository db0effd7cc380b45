"""A run's global model as a bundle: `copfl evaluate` and `export` take the app's folder with --global.

A site that does not train can so evaluate it on its own samples. It is the model that a client receives which never
took part.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from copfl import __version__, foreign
from copfl.core.algorithm import message_to_new_client
from copfl.core.task import Personal
from copfl.data.contract.contract import ARRAYS, Contract
from copfl.experiment.bundle import writing
from copfl.experiment.bundle.base import portable, write_base
from copfl.experiment.bundle.description import Array, Description, Input, Origin, Output
from copfl.experiment.bundle.places import BASE, OF_SERVER
from copfl.experiment.models.client_models import GLOBAL
from copfl.federation.policy.file import FILE, read_policy
from copfl.federation.policy.request import admitted
from copfl.federation.protocol.app_folder import last_run, read_app
from copfl.federation.protocol.files import private_folder, stored
from copfl.federation.protocol.settings import TEXT, TrainingSettings, settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.settings.schema import table_of
from copfl.wire import Head


def write_global(app: Path) -> Path:
    """Writes the bundle of the last finished round's global model; the result is its folder.

    Args:
        app: The server's folder.
    """
    read_app(app)  # an error if it is no app
    runs = app.resolve() / "runs"
    folder = runs / last_run(app)
    settings = _settings_of_run(app, folder)
    algorithm, task, clients = settings.algorithm, settings.task, settings.federation.clients
    server = ServerFolder(str(runs), folder.name, resume=True)
    opened, rounds = server.checkpoint(
        algorithm.server_init(task, clients),
        lambda round: Head("server", folder.name, settings.layout, round, -1),
    )
    with torch.no_grad():
        down = message_to_new_client(algorithm, opened.record, torch.arange(clients))
        model: Personal = algorithm.personal_model(task, algorithm.client_init(task), down)
    bundle, base = private_folder(folder / OF_SERVER), folder / BASE
    table, facts = table_of(settings.run.model), _description(settings, folder.name, rounds)
    has_base = base.is_dir() or write_base(base, task, table, facts.input.text is not None)
    facts = dataclasses.replace(facts, base=f"../{BASE}" if has_base else "")
    writing.write_bundle(bundle, facts, task.layout, model)
    return bundle


def _settings_of_run(app: Path, folder: Path) -> TrainingSettings:
    """The settings of a run, which the server's policy admits."""
    path = foreign.inside(app, folder / "config.json")
    config = stored(path, dict[str, Any], damaged=f"{path} cannot be read: {{}}")
    plain = {key: value for key, value in config.items() if "." in key}
    run_config, _ = admitted(read_policy(app / FILE), plain)  # the code of its policy is the server's to load
    return settings_of(run_config)


def _description(settings: TrainingSettings, run: str, rounds: int) -> Description:
    """What the model takes and returns, by what the federation agreed on; the server has no samples."""
    federation, task, samples = settings.federation, settings.task, settings.federation.samples
    contract = Contract.read(samples.contract) if samples.contract else None
    encoders = contract.encoders if contract and contract.data != ARRAYS else None
    arrays = {"x": Array("uint8" if len(samples.shape) == 3 else "float32", samples.shape)}
    if samples.text:
        assert isinstance(TEXT, dict)
        arrays = {name: Array("int64", shape) for name, shape in TEXT.items()}
    text = (encoders.text if encoders else None) or ("text" if samples.text else None)
    mean, std = (() if t is None else tuple(t.flatten().tolist()) for t in (task.mean, task.std))
    is_table = encoders is not None and not samples.text
    return Description(
        model=portable(table_of(settings.run.model)),
        adapter=table_of(settings.run.adapter),
        task=table_of(settings.run.task),
        seed=settings.run.run.seed,
        dtype=str(task.initial.dtype).removeprefix("torch."),
        input=Input(
            arrays,
            columns=encoders.columns if encoders and is_table else (),
            missing=encoders.missing if encoders else "refuse",
            text=text,
            mean=mean,
            std=std,
            group=encoders.group if encoders else "",
            time=encoders.time if encoders else "",
        ),
        output=Output(
            samples.kind,
            samples.outputs,
            samples.names_of_outputs(encoders.targets if encoders else ()),
            encoders.targets if encoders else (),
            *samples.scale,
        ),
        origin=Origin(
            f"{settings.run.algorithm.title} in a federation",
            f"{federation.clients} sites",
            GLOBAL,
            federation.rounds,
            federation.clients,
            round=rounds,
            name=f"run {run}",
        ),
        copfl=__version__,
    )
