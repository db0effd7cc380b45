"""The result of a run, in memory: `copfl.run` returns it."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from copfl.core import tree
from copfl.core.algorithm import message_to_new_client
from copfl.core.evaluation import VALIDATED
from copfl.core.task import Personal
from copfl.data.clients.groups import names_of_clients
from copfl.data.sets.stored import stored
from copfl.engine.rounds import State
from copfl.errors import UsageError, unknown
from copfl.experiment import folder as run_folder
from copfl.experiment import records
from copfl.experiment.analysis.hints import warnings_of
from copfl.experiment.bundle.bundle import Bundle
from copfl.experiment.bundle.description import Description, Hazard, Origin, Score
from copfl.experiment.bundle.writing import describe, write_bundles
from copfl.experiment.coefficients import Coefficients, coefficients_of
from copfl.experiment.experiment import Experiment
from copfl.experiment.models.client_models import (
    GLOBAL,
    TRAINED,
    ClientModels,
    InFolder,
    network_of,
    received_model,
)
from copfl.experiment.probabilities import MEASURED
from copfl.experiment.run_record import RunRecord
from copfl.measures.metrics import Metric
from copfl.stats import Numbers


@dataclass(eq=False, repr=False, kw_only=True)
class Result(RunRecord):
    """The result of a run; arrays are [rounds, clients], nan where a client was not evaluated.

    `print` shows what decides; a notebook shows the clients as a table. It has what its run folder has, and the data
    and the models beside.

    Args:
        experiment: What was trained: the settings, the data, the model.
        state: After the last round.
        kept: The weights of each client's own model, see `models`; None with run.save_models=False.
    """

    experiment: Experiment
    state: State
    kept: ClientModels | None = None

    def __str__(self) -> str:
        """Such as "copfl on digits: 10 clients, partition classes, 40 rounds, accuracy 94.1 %"."""
        e, metric = self.experiment, self.primary
        values = self.final(metric.name) if self.records else np.zeros(0)
        known = values[~np.isnan(values)]
        mean = f", {metric.title} {metric.text(float(known.mean()))}{metric.unit}" if len(known) else ""
        folder = "" if self.folder is None else f", in {self.folder}"
        clients = f"{e.clients} clients, partition {e.federation.partition.scheme}"
        return f"{e.title}: {clients}, {len(self.records)} rounds{mean}{folder}"

    def save(self, path: str | Path) -> Path:
        """The run as a folder, for reports, export, predict and resume.

        Unlike `run(..., out=path)` it stores the samples that the program passed, so these work without them.

        Args:
            path: A new folder.
        """
        e = self.experiment
        with run_folder.claimed(Path(path), new=True) as folder:
            data = stored(e.federation.dataset) if e.run.data.description else None
            folder.begin(e.run.tables(), e.federation.partition, e.about(), data)
            for record, seconds in zip(self.records, self.seconds, strict=True):
                folder.append(record, seconds)
            folder.checkpoint(self.state, e.fingerprints())
            if self.kept is not None:
                models = folder.models(e.task)
                for n in range(e.clients):
                    if (kept := self.kept.get(n)) is not None:
                        models.put(n, kept.model, kept.stage.round, kept.stage.name)
                models.settle(self.state.round)
                self.write_bundles(models)
            for finding, found in self.found():
                finding.write(found, folder.path)
        self.folder = Path(path)
        return self.folder

    def write_bundles(self, models: InFolder) -> None:
        """Completes the clients' models in a run folder to bundles, and adds the global model's."""
        e, partition = self.experiment, self.experiment.federation.partition
        names, scores = names_of_clients(e.federation.dataset, partition), self._scores(models)
        tables, server = e.run.tables(), self._global_model()
        write_bundles(
            models,
            self._description(),
            e.task,
            tables,
            server,
            names,
            scores,
            self._temperatures,
            self._hazards,
        )

    def _description(self) -> Description:
        """What the models take and return, and where they come from."""
        e, data = self.experiment, self.experiment.federation.dataset
        rounds, select = len(self.records), e.settings.select
        origin = Origin(e.title, data.name, TRAINED, rounds, e.clients, select=select, note=data.note)
        return describe(e.run.tables(), e.task, data, e.settings.seed, origin)

    @property
    def _temperatures(self) -> list[float]:
        """Of each client's probabilities."""
        if self.probabilities is None:
            return [1.0] * self.experiment.clients
        temperatures: list[float] = self.probabilities.temperature.tolist()
        return temperatures

    @property
    def _hazards(self) -> Sequence[Hazard | None]:
        """Of each client's site."""
        return [None] * self.experiment.clients if self.survival is None else self.survival.hazards

    def _scores(self, models: ClientModels) -> list[list[Score]]:
        """The metrics of each client's model, in the round that it was taken from."""
        e, partition, new = self.experiment, self.experiment.federation.partition, self.new_clients
        stages = [models.stage(n) for n in range(e.clients)]
        trained = [stage.round if stage is not None and stage.name == TRAINED else 0 for stage in stages]
        scores: list[list[Score]] = [[] for _ in stages]
        splits = [("test" if partition.test_from == "test" else "validation", "", partition.test)]
        splits += [("validation", VALIDATED, partition.validation)] if partition.validation else []
        for split, suffix, samples in splits:
            for metric in e.task.metrics:
                values = records.at_rounds(self.records, f"{metric.name}{suffix}", np.array(trained))
                if self.final_evaluation is not None:
                    values = self.final_evaluation.completed(values, f"{metric.name}{suffix}")
                if new is not None and metric == self.primary:
                    values[new.clients] = new.validation if suffix else new.accuracy["all"]
                for n in np.flatnonzero(np.isfinite(values)).tolist():
                    scores[n].append(Score(metric.name, split, float(values[n]), len(samples[n])))
        for name in () if self.probabilities is None else MEASURED:
            values = getattr(self.probabilities, name)
            for n in np.flatnonzero(np.isfinite(values) & (np.array(trained) > 0)).tolist():
                if name not in [metric.name for metric in e.task.metrics]:
                    scores[n].append(Score(name, splits[0][0], float(values[n]), len(partition.test[n])))
        return scores

    def __repr__(self) -> str:
        from copfl.experiment import views  # it shows results

        return "\n".join(views.lines(self))

    def _repr_html_(self) -> str:
        from copfl.experiment import views  # it shows results

        return views.html(self)

    def to_pandas(self, of: str = "clients") -> Any:
        """A data frame of pandas: a row per client, or a row per round and client with all that was recorded.

        Args:
            of: "clients" or "rounds".
        """
        from copfl.experiment import views  # it shows results

        return views.frame(self, of)

    def plot(self, path: str | Path | None = None, *, of: str = "gains") -> Any:
        """A figure of matplotlib: each site's gain over the best that it has alone, with its interval.

        Args:
            path: Of a file that it is saved in, such as "gains.png"; None: in none.
            of: "gains", or "rounds" for the curves over the rounds. Where nothing is known of the sites alone, there
                are the curves only.
        """
        from copfl.experiment import views  # it shows results

        figure = views.picture(self, of)
        if path is not None:
            figure.savefig(path)
        return figure

    def predict(self, x: Any, client: int | str = GLOBAL, *, missing: str | None = None) -> NDArray[Any]:
        """The answers of a client's model, or of the global one, to new samples, see `copfl.Bundle.predict`.

        Args:
            x: A data frame with the columns of the training, arrays, or texts.
            client: Its number, from 0, or its name.
            missing: "fill" or "refuse", for missing values of a table; by default as in training.
        """
        return self.bundle(client).predict(x, missing=missing)

    def predict_proba(
        self, x: Any, client: int | str = GLOBAL, *, missing: str | None = None
    ) -> NDArray[np.float64]:
        """The probabilities [n, classes] of a client's model, or of the global one, for new samples.

        Args:
            x: As of `predict`.
            client: As of `predict`.
            missing: As of `predict`.
        """
        return self.bundle(client).predict_proba(x, missing=missing)

    def predict_survival(
        self, x: Any, times: Sequence[float], client: int | str = GLOBAL, *, missing: str | None = None
    ) -> NDArray[np.float64]:
        """The probability [n, times] of no event up to each of these times, see `copfl.Bundle.predict_survival`.

        Args:
            x: As of `predict`.
            times: In the unit of the training data.
            client: As of `predict`; the global model has no site, and so no probabilities with Cox's objective.
            missing: As of `predict`.
        """
        return self.bundle(client).predict_survival(x, times, missing=missing)

    def bundle(self, client: int | str = GLOBAL) -> Bundle:
        """A client's model, or the global one, with all that its use needs.

        Args:
            client: Its number, from 0, or its name.
        """
        general, task = self._description(), self.experiment.task
        if client == GLOBAL:
            return Bundle(general, task, self._global_model())
        number = self.number_of(client)
        output = dataclasses.replace(
            general.output, temperature=self._temperatures[number], hazard=self._hazards[number]
        )
        origin = dataclasses.replace(general.origin, client=number, name=self.client_names[number])
        facts = dataclasses.replace(general, output=output, origin=origin)
        return Bundle(facts, task, self.client_model(number))

    def number_of(self, client: int | str) -> int:
        """The number of a client, from 0.

        Args:
            client: The number, or the name in the data.
        """
        names = self.client_names
        number = names.index(client) if isinstance(client, str) and client in names else client
        if isinstance(number, str):
            raise unknown("client", client, names)
        if not 0 <= number < len(names):
            raise UsageError(f"there is no client {number}; the run has clients 0 to {len(names) - 1}")
        return int(number)

    @property
    def models(self) -> Sequence[nn.Module]:
        """The network of each client, as of `model`."""
        return Models(self)

    def model(self, client: int | str, *, before_training: bool = False) -> nn.Module:
        """A copy of the network with this client's weights as they were evaluated, see `rounds_taken`.

        Args:
            client: Its number, from 0, or its name. Of a mixture, the weights are those with the largest share.
            before_training: The weights that the client has after the last aggregation instead, from which it
                would train in a further round.
        """
        return self._network(self.client_model(client, before_training=before_training))

    def client_model(self, client: int | str, *, before_training: bool = False) -> Personal:
        """The weights of `model` as one vector, or the whole mixture.

        Args:
            client: Its number, from 0, or its name.
            before_training: As of `model`.
        """
        e, client = self.experiment, self.number_of(client)
        if before_training:
            return received_model(e.algorithm, e.task, self.state, client)
        kept = self.kept_model(client)
        if kept is None:
            raise UsageError(
                "the run kept no models, as save_models is off; run it with save_models=True, or take the "
                "model before local training: before_training=True"
            )
        return kept

    def kept_model(self, client: int) -> Personal | None:
        """The weights of `model` as one vector, or the whole mixture; None where the run kept none.

        Args:
            client: Its number, from 0.
        """
        kept = None if self.kept is None else self.kept.get(client)
        return None if kept is None else kept.model

    def global_model(self) -> nn.Module:
        """A copy of the network with the weights that a client which never took part would receive."""
        return self._network(self._global_model())

    def _global_model(self) -> Personal:
        e = self.experiment
        trained = torch.from_numpy(e.settings.split_clients[0]).to(e.task.device)
        down = message_to_new_client(e.algorithm, self.state.server, trained)
        model = e.algorithm.personal_model(e.task, e.algorithm.client_init(e.task), down)
        return tree.each(torch.Tensor.cpu, model)

    def _network(self, personal: Personal) -> nn.Module:
        return network_of(self.experiment.task, personal).eval()

    @property
    def coefficients(self) -> Coefficients | None:
        """Those of a linear model with levels, with standard errors; None of other algorithms."""
        e = self.experiment
        return coefficients_of(e.algorithm, self.state.server, e.federation.dataset, self.records)

    @property
    def warnings(self) -> list[str]:
        """Hints, clients that diverged, a loss that exploded, accuracy at chance; empty if there is none."""
        e = self.experiment
        rated = e.run.optimizer.lr is not None
        return [*e.hints, *warnings_of(self.records, e.federation, e.server_step, rated=rated)]

    @property
    def primary(self) -> Metric:
        """The primary metric of the run: the first of those that were asked for."""
        return self.experiment.task.metrics[0]

    @property
    def accuracy(self) -> Numbers:
        """Accuracy of the personal model after local training, on each client's test samples."""
        return self.metric_or_nan("accuracy")

    @property
    def accuracy_before(self) -> Numbers:
        """Accuracy of the personal model before local training."""
        return self.metric_or_nan("accuracy_before")

    @property
    def accuracy_global(self) -> Numbers:
        """Accuracy of the global model, which a new client would get."""
        return self.metric_or_nan("accuracy_global")

    @property
    def weight(self) -> Numbers:
        """Each client's weight in the round's mean."""
        return self.metric_or_nan("weight")


@dataclass(frozen=True)
class Models(Sequence[nn.Module]):
    """The clients' networks, each made when it is asked for."""

    result: Result

    def __len__(self) -> int:
        return self.result.experiment.clients

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self.result.model(n) for n in range(len(self))[client]]
        if isinstance(client, int) and not -len(self) <= client < len(self):
            raise IndexError(f"there is no client {client}; the run has clients 0 to {len(self) - 1}")
        return self.result.model(client % len(self) if isinstance(client, int) else client)

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self.result.model, range(len(self)))

    def __repr__(self) -> str:
        return f"the networks of {len(self)} clients"
