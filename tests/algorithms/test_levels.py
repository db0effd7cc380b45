"""Levels against statsmodels, dense likelihoods and scipy; by sums of any kind; and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import nn

import copfl
from copfl import wire
from copfl.algorithms import Levels
from copfl.algorithms.levels import Server, Upload
from copfl.core import Task, received, task_of, tree
from copfl.core.criteria import CRITERIA, classification, multilabel, next_token, regression
from copfl.core.evaluation import vectors_of
from copfl.core.payload import nbytes
from copfl.data.clients.federation import FederatedData
from copfl.data.clients.partition import Partition
from copfl.data.samples import Dataset, Samples
from copfl.data.sets import published
from copfl.data.sets.datasets import load
from copfl.data.tables.columns import DataTable, row_texts
from copfl.data.tables.encoders import encoded
from copfl.data.tables.files import read_table
from copfl.data.tables.tables import from_tables
from copfl.engine.mapping import vmap
from copfl.errors import UsageError
from copfl.experiment.coefficients import table as coefficients_table
from copfl.experiment.models.new_clients import local_baseline
from copfl.federation.protocol import secure_total
from copfl.federation.protocol.secure_sum import Rules, dequantised
from copfl.models.networks import MLP, Linear
from copfl.parts.mixed_model import Variances, contrasts_of
from copfl.tables import as_text
from copfl.testing import check_algorithm
from tests.slow import slow
from tests.toys import everything, rounds_of

Floats = NDArray[np.float64]
SIZES = (3, 8, 15, 30, 5, 12, 40, 7)
SITE = np.repeat(np.arange(len(SIZES)), SIZES)
ROUNDS = 15


class Rows(NamedTuple):
    """The rows of all sites in one place."""

    x: Floats
    y: NDArray[Any]

    @property
    def design(self) -> Floats:
        """x with a last column of 1."""
        return np.column_stack([self.x, np.ones(len(self.x))])


def values() -> Rows:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(SITE), 3))
    own = 0.8 * rng.normal(size=len(SIZES))
    return Rows(x, x @ [1.0, -0.5, 0.2] + 2 + own[SITE] + rng.normal(size=len(SITE)))


def labelled(classes: int = 2) -> Rows:
    """Classes whose log odds depend on x and on the site."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(len(SITE), 3))
    logits = x @ rng.normal(size=(3, classes)) + rng.normal(size=(len(SIZES), classes))[SITE]
    return Rows(x, (logits + rng.gumbel(size=logits.shape)).argmax(1))


def federation_of(rows: Rows, kind: str, names: Sequence[str], sizes: Sequence[int] = SIZES) -> FederatedData:
    samples = Samples(rows.x, rows.y)
    parts = tuple(np.split(np.arange(len(rows.y)), np.cumsum(sizes)[:-1]))
    return FederatedData(
        Dataset("toy", samples, samples, tuple(names), kind=kind), Partition(parts, parts, "by hand", {})
    )


class Fitted(NamedTuple):
    """The state after the rounds."""

    server: Server
    effects: Floats  # [N, B, q, c], of the sites
    changes: list[float]  # of the coefficients, in each round

    @property
    def coefficients(self) -> Floats:
        return self.server.coefficients.numpy()

    @property
    def ratio(self) -> Floats:
        """τ²/σ², [B, t]."""
        return self.server.variances.log_ratio.exp().numpy()


def fitted(algorithm: Levels, task: Task, federation: FederatedData, rounds: int = ROUNDS) -> Fitted:
    state, shown = rounds_of(algorithm, task, federation, rounds, vmap(64))
    effects = state.clients.rows(torch.arange(federation.clients)).effects.numpy()
    return Fitted(state.server, effects, [one.federation["coefficient_change"] for one in shown])


def task_for(kind: str, outputs: int, columns: int = 3) -> Task:
    return task_of(Linear((columns,), outputs), outputs, criterion=CRITERIA[kind](), dtype=torch.float64)


# -- values --------------------------------------------------------------------------------------------------


def test_values_are_those_of_statsmodels() -> None:
    """Restricted maximum likelihood: fixed effects, both variances, and the sites' intercepts."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    rows = values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its first, coarse search
        model = MixedLM(rows.y, rows.design, groups=SITE)
        expected = model.fit(reml=True, method=["powell", "bfgs"])
    found = fitted(Levels(shrink=False), task_for("regression", 1), federation_of(rows, "regression", "y"))
    assert found.coefficients.ravel() == pytest.approx(expected.fe_params, abs=1e-6)
    scale = float(found.server.scale)
    assert scale == pytest.approx(expected.scale, abs=1e-6)
    assert scale * found.ratio.item() == pytest.approx(float(expected.cov_re[0, 0]), abs=1e-6)
    intercepts = [float(one.iloc[0]) for one in expected.random_effects.values()]
    assert found.effects.ravel() == pytest.approx(intercepts, abs=1e-6)
    assert found.changes[6] < 1e-12  # seven rounds are enough


def test_standard_errors_are_those_of_generalised_least_squares() -> None:
    rows = values()
    found = fitted(Levels(shrink=False), task_for("regression", 1), federation_of(rows, "regression", "y"))
    same_site = (SITE[:, None] == SITE).astype(float)
    v = float(found.server.scale) * (np.eye(len(SITE)) + found.ratio.item() * same_site)
    covariance = np.linalg.inv(rows.design.T @ np.linalg.solve(v, rows.design))
    assert found.server.covariance[0].numpy() == pytest.approx(covariance, abs=1e-9)


def test_an_intercept_is_the_shrunken_sum_of_residuals() -> None:
    """Σ r / (m + k), k = σ²/τ²."""
    rows = values()
    found = fitted(Levels(), task_for("regression", 1), federation_of(rows, "regression", "y"))
    residuals = rows.y - rows.design @ found.coefficients.ravel()
    by_hand = np.bincount(SITE, residuals) / (np.array(SIZES) + 1 / found.ratio.item())
    assert found.effects.ravel() == pytest.approx(by_hand, abs=1e-9)


def dense_criterion(rows: Rows, log_ratios: Sequence[float], log_prior: float) -> float:
    """-2 log restricted likelihood of values, without sums: effects of sites and slopes are in the covariance."""
    z = (SITE[:, None] == SITE).astype(float)
    v = np.eye(len(SITE)) + np.exp(log_ratios[0]) * z + np.exp(log_prior) * rows.x @ rows.x.T
    for ratio in log_ratios[1:]:
        v += np.exp(ratio) * z * (rows.x @ rows.x.T)
    one = np.ones((len(SITE), 1))
    inverse = np.linalg.inv(v)
    information = one.T @ inverse @ one
    projected = inverse - inverse @ one @ np.linalg.inv(information) @ one.T @ inverse
    spare = len(SITE) - 1
    volume = np.linalg.slogdet(v)[1] + np.linalg.slogdet(information)[1]
    return float(volume + spare * np.log(rows.y @ projected @ rows.y))


@pytest.mark.job
@pytest.mark.parametrize("varying", ["intercept", "all"])
def test_variances_have_the_highest_restricted_likelihood(varying: str) -> None:
    """Of intercepts, of slopes where they vary, and of the prior of the common slopes."""
    rows = values()
    task, federation = task_for("regression", 1), federation_of(rows, "regression", "y")
    found = fitted(Levels(varying=varying), task, federation, rounds=30)
    ratios, prior = found.server.variances.log_ratio[0].numpy(), float(found.server.variances.log_prior)
    start = [*(-1.0 for _ in ratios), 0.0]
    best = minimize(
        lambda at: dense_criterion(rows, at[:-1].tolist(), at[-1]),
        start,
        bounds=[(-14, 7)] * len(ratios) + [(-10, 5)],
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-9},
    )
    assert dense_criterion(rows, ratios.tolist(), prior) == pytest.approx(best.fun, abs=1e-7)
    assert [*np.exp(ratios), np.exp(prior)] == pytest.approx(np.exp(best.x), rel=1e-3, abs=1e-4)


@pytest.mark.job
def test_two_values_are_two_models() -> None:
    rows = values()
    both = Rows(rows.x, np.column_stack([rows.y, rows.y[::-1]]))
    one = fitted(Levels(), task_for("regression", 1), federation_of(rows, "regression", "y"))
    two = fitted(Levels(), task_for("regression", 2), federation_of(both, "regression", "yz"))
    assert two.coefficients[0] == pytest.approx(one.coefficients[0], abs=1e-9)
    assert two.effects[:, 0] == pytest.approx(one.effects[:, 0], abs=1e-9)


# -- classes -------------------------------------------------------------------------------------------------


def penalised_loss(
    rows: Rows, at: torch.Tensor, classes: int, variances: Variances, shrink: bool
) -> torch.Tensor:
    """-log posterior of coefficients and effects of the sites together, given their variances."""
    outputs, columns = classes - 1, rows.design.shape[1]
    beta = at[: outputs * columns].view(outputs, columns)
    effects = at[outputs * columns :].view(len(SIZES), outputs)
    eta = torch.from_numpy(rows.design) @ beta.T + effects[torch.from_numpy(SITE)]
    logits = eta @ contrasts_of(classes, torch.device("cpu"), torch.float64).T
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(rows.y), reduction="sum")
    loss = loss + (effects**2).sum() / variances.log_ratio.exp().sum() / 2
    return loss + (beta[:, :-1] ** 2).sum() / variances.log_prior.exp().sum() / 2 if shrink else loss


@pytest.mark.job
@pytest.mark.parametrize(("classes", "shrink"), [(2, False), (2, True), (3, True)])
def test_classes_have_the_highest_penalised_likelihood(classes: int, shrink: bool) -> None:
    """Coefficients and effects of all sites together, for the variances that were found."""
    rows = labelled(classes)
    task, names = task_for("classification", classes), "abc"[:classes]
    found = fitted(Levels(shrink=shrink), task, federation_of(rows, "classification", names), 20)

    def loss_and_gradient(at: Floats) -> tuple[float, Floats]:
        free = torch.from_numpy(at).requires_grad_()
        loss = penalised_loss(rows, free, classes, found.server.variances, shrink)
        (gradient,) = torch.autograd.grad(loss, free)
        return loss.item(), gradient.numpy()

    ours = np.concatenate([found.coefficients.ravel(), found.effects.ravel()])
    best = minimize(loss_and_gradient, np.zeros(ours.size), jac=True, method="BFGS", options={"gtol": 1e-9})
    assert ours == pytest.approx(best.x, abs=1e-6)
    assert np.abs(loss_and_gradient(ours)[1]).max() < 1e-6
    assert found.changes[-1] < 1e-7


@pytest.mark.job
def test_the_variance_of_classes_is_that_of_the_working_model() -> None:
    """Penalised quasi-likelihood: the restricted likelihood of the working response, by dense matrices."""
    rows = labelled()
    found = fitted(
        Levels(shrink=False), task_for("classification", 2), federation_of(rows, "classification", "ab"), 25
    )
    eta = rows.design @ found.coefficients.ravel() + found.effects.ravel()[SITE]
    p = 1 / (1 + np.exp(-eta))
    weights = p * (1 - p)
    response = eta + (rows.y - p) / weights
    same_site = (SITE[:, None] == SITE).astype(float)

    def criterion(log_ratio: float) -> float:
        v = np.diag(1 / weights) + np.exp(log_ratio) * same_site
        inverse = np.linalg.inv(v)
        information = rows.design.T @ inverse @ rows.design
        inside = inverse - inverse @ rows.design @ np.linalg.solve(information, rows.design.T @ inverse)
        return float(
            np.linalg.slogdet(v)[1] + np.linalg.slogdet(information)[1] + response @ inside @ response
        )

    best = minimize(lambda at: criterion(at[0]), [-1.0], method="Nelder-Mead", options={"xatol": 1e-9})
    assert np.log(found.ratio.item()) == pytest.approx(best.x[0], abs=1e-4)


@pytest.mark.job
def test_labels_are_models_of_two_classes() -> None:
    rows = labelled()
    both = Rows(rows.x, np.column_stack([rows.y, 1 - rows.y]).astype(np.float32))
    one = fitted(Levels(), task_for("classification", 2), federation_of(rows, "classification", "ab"))
    two = fitted(Levels(), task_for("multilabel", 2), federation_of(both, "multilabel", "ab"))
    assert two.coefficients[0] == pytest.approx(one.coefficients[0], abs=1e-6)
    assert two.coefficients[1] == pytest.approx(-one.coefficients[0], abs=1e-6)


def test_every_log_odds_has_the_same_variance() -> None:
    for classes in (2, 3, 5):
        contrasts = contrasts_of(classes, torch.device("cpu"), torch.float64)
        assert contrasts.sum(0).numpy() == pytest.approx(np.zeros(classes - 1), abs=1e-12)
        distances = torch.cdist(contrasts, contrasts)
        assert distances.numpy() == pytest.approx(1 - np.eye(classes), abs=1e-7)
    two = contrasts_of(2, torch.device("cpu"), torch.float64)
    assert two.flatten().tolist() == pytest.approx([-0.5, 0.5])


# -- by sums -------------------------------------------------------------------------------------------------


def test_one_site_or_many_have_the_same_equations_without_levels() -> None:
    """Where sites do not differ, τ is nearly 0, and the model is that of all rows in one place."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(len(SITE), 3))
    noise = rng.normal(size=len(SITE))
    noise -= (np.bincount(SITE, noise) / np.array(SIZES))[SITE]  # no site is above another
    rows = Rows(x, x @ [1.0, -0.5, 0.2] + noise)
    found = fitted(
        Levels(shrink=False), task_for("regression", 1), federation_of(rows, "regression", "y"), 20
    )
    pooled = np.linalg.lstsq(rows.design, rows.y, rcond=None)[0]
    assert found.ratio.item() < 1e-4
    assert found.coefficients.ravel() == pytest.approx(pooled, abs=1e-3)


@pytest.mark.job
def test_secure_sums_agree_within_their_step() -> None:
    rows = values()
    task, federation = task_for("regression", 1), federation_of(rows, "regression", "y")
    algorithm, rules = Levels(), Rules(len(SIZES))
    secure_total.check(algorithm, task, (3,), len(SIZES), augment=False)
    server = algorithm.server_init(task, len(SIZES))
    states = [algorithm.client_init(task)] * len(SIZES)
    for _ in range(8):
        words = np.zeros(0, np.uint64)
        for n in range(len(SIZES)):
            data = tree.row(federation.train.rows([n]), 0)
            down = received(algorithm, server, torch.tensor(n))
            with torch.no_grad():
                output = algorithm.client_update(task, states[n], down, data, everything(data, 1))
            states[n] = output.client
            total = secure_total.summand_of(algorithm, task, len(SIZES), output.upload)
            sums = secure_total.sums_of(total, {}, rules)
            word = secure_total.words_of(sums, rules)
            words = word if not len(words) else words + word
        total = secure_total.sums_from(dequantised(words, rules), sums).total
        server, _ = algorithm.server_update(task, server, total)
    plain = fitted(algorithm, task, federation, 8)
    # Entries of the equations are rounded to steps of 2e-6 of 16 rows; the least site has three rows.
    assert server.coefficients.numpy() == pytest.approx(plain.coefficients, abs=100 * rules.step)
    assert server.scale.numpy() == pytest.approx(plain.server.scale.numpy(), abs=100 * rules.step)


def test_only_sums_leave_a_site() -> None:
    assert Upload._fields == ("sums",)
    rows = labelled()
    task = task_for("classification", 2)
    data = tree.row(federation_of(rows, "classification", "ab").train.rows([3]), 0)
    algorithm = Levels()
    down = received(algorithm, algorithm.server_init(task, 8), torch.tensor(0))
    output = algorithm.client_update(task, algorithm.client_init(task), down, data, everything(data, 1))
    # Four coefficients bordered by the response: 15 numbers, and their two derivatives; L too; and the rows.
    assert output.upload.sums.shape == (1 + 3 * 15 + 3,)


def test_a_new_site_gets_its_intercept_from_its_own_rows() -> None:
    rows = values()
    task, federation = task_for("regression", 1), federation_of(rows, "regression", "y")
    found = fitted(Levels(), task, federation)
    rng = np.random.default_rng(7)
    x = rng.normal(size=(10, 3))
    y = np.column_stack([x, np.ones(10)]) @ found.coefficients.ravel() + 5.0
    site = federation_of(Rows(x, y), "regression", "y", [10])
    data = tree.row(site.train.rows([0]), 0)
    down = received(Levels(), found.server, torch.tensor(0))
    client = Levels().client_init(task)
    output = Levels().client_update(task, client, down, data, everything(data, 1))
    assert output.client.effects.item() == pytest.approx(50 / (10 + 1 / found.ratio.item()))
    bias = task.layout.split(vectors_of(output.trained))["head.bias"]
    assert bias.item() == pytest.approx(found.coefficients.ravel()[-1] + output.client.effects.item())


# -- without levels, and alone ---------------------------------------------------------------------------------


def test_where_nothing_varies_it_is_least_squares_of_all_rows() -> None:
    rows = values()
    task, federation = task_for("regression", 1), federation_of(rows, "regression", "y")
    found = fitted(Levels(varying="none", shrink=False), task, federation, 2)
    assert found.coefficients.ravel() == pytest.approx(np.linalg.lstsq(rows.design, rows.y)[0], abs=1e-9)
    assert found.changes[1] < 1e-9  # one round


def test_alone_each_site_has_its_own_model() -> None:
    """Least squares of its own rows, or logistic regression as scikit-learn finds it; and nothing is sent."""
    rows = values()
    task, federation = task_for("regression", 1), federation_of(rows, "regression", "y")
    algorithm = Levels(alone=True, shrink=False)
    state, _ = rounds_of(algorithm, task, federation, 2, vmap(64))
    own = state.clients.rows(torch.arange(8)).own.coefficients.numpy()
    for site in np.flatnonzero(np.array(SIZES) > 4):
        x, y = rows.design[site == SITE], rows.y[site == SITE]
        assert own[site].ravel() == pytest.approx(np.linalg.lstsq(x, y)[0], abs=1e-8)
    data = tree.row(federation.train.rows([3]), 0)
    down = received(algorithm, state.server, torch.tensor(3))
    output = algorithm.client_update(task, algorithm.client_init(task), down, data, everything(data, 1))
    assert output.upload.sums.numel() == 0


def test_alone_the_prior_is_that_of_the_sites_own_rows() -> None:
    from sklearn.linear_model import LogisticRegression

    rows = labelled()
    task, federation = task_for("classification", 2), federation_of(rows, "classification", "ab")
    state, _ = rounds_of(Levels(alone=True), task, federation, 15, vmap(64))
    own = tree.row(state.clients.rows(torch.arange(8)).own, 6)
    x, y = rows.x[SITE == 6], rows.y[SITE == 6]
    model = LogisticRegression(C=float(own.variances.log_prior.exp()), tol=1e-10, max_iter=1000).fit(x, y)
    expected = [*model.coef_[0], model.intercept_[0]]
    assert own.coefficients.flatten().tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.job
def test_a_run_compares_with_each_site_alone(tmp_path: Path) -> None:
    result = copfl.run("levels", "heart", local_baseline=True, rivals=False, out=tmp_path / "run")
    alone = copfl.run("levels", "heart", rivals=False, algorithm_options={"alone": True})
    assert result.gains is not None
    assert result.gains.alone == pytest.approx(alone.final("accuracy"))
    assert "alone = true" in (tmp_path / "run" / "baseline" / "run.toml").read_text()
    resumed = copfl.resume(tmp_path / "run", rounds=17)
    assert len(resumed.records) == 17
    assert local_baseline(Levels()) == Levels(alone=True)


# -- coefficients --------------------------------------------------------------------------------------------


def table_of(rows: int = 300) -> Dataset:
    """A table with numbers of other units, a category and sites."""
    rng = np.random.default_rng(3)
    site, age, sex = rng.integers(0, 6, rows), rng.normal(60, 10, rows), rng.choice(["f", "m"], rows)
    y = 100 + 0.7 * age + 5 * (sex == "m") + 3 * rng.normal(size=6)[site] + rng.normal(size=rows)
    columns = {"age": age, "sex": sex.tolist(), "site": [f"s{n}" for n in site], "score": y}
    return from_tables([DataTable.of(columns)], "table", target="score", client="site")


def test_coefficients_are_in_the_units_of_the_columns() -> None:
    found = copfl.run("levels", table_of(), rounds=10).coefficients
    assert found is not None
    assert found.converged
    by_column = {one.column: one for one in found.coefficients}
    assert list(by_column) == ["age", "sex=m", "(intercept)"]
    error = by_column["age"].error
    assert error is not None
    assert by_column["age"].value == pytest.approx(0.7, abs=4 * error)
    assert 0.002 < error < 0.02
    assert by_column["sex=m"].value == pytest.approx(5, abs=0.5)
    assert by_column["(intercept)"].value == pytest.approx(100, abs=5)
    (spread,) = found.spreads
    assert spread.residuals == pytest.approx(1, abs=0.15)
    assert 1 < spread.intercepts < 8
    text = as_text(coefficients_table(found))
    assert "standard error" in text
    assert "Not converged" not in text
    assert copfl.run("fedavg", table_of(), rounds=1).coefficients is None


def test_coefficients_that_have_not_converged_are_named() -> None:
    found = copfl.run("levels", table_of(), rounds=1).coefficients
    assert found is not None
    assert "Not converged" in as_text(coefficients_table(found))


def contrasts_in(data: Dataset) -> tuple[list[str], Floats]:
    """The names of the lines, and the train rows in the units of the columns: each category but the first, and 1.

    Rows that miss a category have a column more, at the end.
    """
    assert data.table is not None
    names, columns, gaps, first = [], [], [], 0
    for encoder in data.table.columns:
        cells = np.asarray(data.train.x[:, first : first + encoder.width], np.float64)
        if encoder.categories:
            names += [f"{encoder.name}={category}" for category in encoder.categories[1:]]
            columns += list(cells[:, 1:].T)
            gaps += [1 - cells.sum(1)] if (cells.sum(1) == 0).any() else []
        else:
            names += [encoder.name, f"{encoder.name} is missing"][: encoder.width]
            columns += [cells[:, 0] * encoder.std + encoder.mean, *cells[:, 1:].T]
        first += encoder.width
    return [*names, "(intercept)"], np.column_stack([*columns, np.ones(len(data.train)), *gaps])


def of_affairs() -> Dataset:
    """6,366 women, whether they had an affair, and their husband's occupation; by education."""
    from statsmodels.datasets import fair

    table = fair.load_pandas().data.rename(columns={"rate_marriage": "rating"})
    table["occupation_husb"] = [f"o{int(one)}" for one in table["occupation_husb"]]
    table["affair"] = ["yes" if hours > 0 else "no" for hours in table.pop("affairs")]
    columns = {name: table[name].tolist() for name in table}
    return from_tables([DataTable.of(columns)], "affairs", target="affair", client="educ", drop="occupation")


def of_voters() -> Dataset:
    """944 voters of 1996: the logarithm of their town, and for whom they voted; by education."""
    from statsmodels.datasets import anes96

    table = anes96.load_pandas().data
    columns = {name: table[name].tolist() for name in ("age", "income", "educ", "TVnews")}
    columns["vote"] = ["Dole" if one else "Clinton" for one in table["vote"]]
    columns["town"] = (table["logpopul"] + 0.05 * table["educ"] * (table["income"] > 12)).tolist()
    columns["party"] = [f"p{int(one)}" for one in table["PID"]]
    return from_tables([DataTable.of(columns)], "voters", target="town", client="educ")


@pytest.mark.job
@pytest.mark.parametrize(
    ("table", "shrink", "tolerance"),
    [
        ("heart", False, 1e-3),
        ("affairs", False, 1e-3),
        ("affairs", True, 0.02),
        ("voters", False, 1e-3),
        ("voters", True, 0.02),
    ],
)
def test_contrasts_and_their_errors_are_those_of_statsmodels(
    table: str, shrink: bool, tolerance: float
) -> None:
    """Three tables of patients, women and voters: contrasts, and no level with an error of its own."""
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM
    from statsmodels.regression.linear_model import GLS
    from statsmodels.regression.mixed_linear_model import MixedLM

    data = {"heart": lambda: load("heart"), "affairs": of_affairs, "voters": of_voters}[table]()
    is_value = data.kind == "regression"
    options = {"shrink": shrink, "varying": "intercept" if is_value else "none"}
    found = copfl.run("levels", data, rivals=False, rounds=20, algorithm_options=options).coefficients
    assert found is not None
    names, design = contrasts_in(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a coarse search, and of log odds without end
        if is_value:
            site = data.train.group
            assert site is not None
            fit = MixedLM(data.train.y, design, groups=site).fit(reml=True, method=["powell", "bfgs"])
            same_site = (site[:, None] == site).astype(float)
            covariance = float(fit.cov_re[0, 0]) * same_site + fit.scale * np.eye(len(site))
            # MixedLM's own errors also have the uncertainty of the variances: 1.6 % of one of these.
            values, errors = (
                fit.fe_params,
                GLS(data.train.y, design, covariance).fit().normalized_cov_params.diagonal() ** 0.5,
            )
        else:
            fit = GLM(data.train.y, design, family=Binomial()).fit()
            values, errors = fit.params, fit.bse
    assert [one.column for one in found.coefficients] == names
    for one, value, error in zip(found.coefficients, values, errors, strict=False):  # gaps are last
        if error > 100:  # every patient with the gap is ill
            assert one.value is None
            assert one.error is None
            continue
        assert one.error == pytest.approx(error, rel=tolerance), one.column
        assert one.value is not None
        assert abs(one.value - value) <= tolerance * error, one.column
    assert any(one.against for one in found.coefficients)


def test_a_contrast_that_no_row_determines_has_no_error() -> None:
    """Two columns that say the same; and a site's name beside its intercept is none."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["f", "m"], 200)
    columns = {
        "sex": sex.tolist(),
        "title": [{"f": "Ms", "m": "Mr"}[one] for one in sex],
        "age": rng.normal(60, 10, 200),
        "site": rng.choice(["a", "b", "c"], 200).tolist(),
    }
    columns["score"] = rng.normal(size=200) + (sex == "m")
    data = from_tables([DataTable.of(columns)], "twice", target="score", client="site")
    for shrink in (True, False):
        how: dict[str, Any] = {"algorithm_options": {"shrink": shrink}, "rivals": False, "rounds": 6}
        found = copfl.run("levels", data, **how).coefficients
        assert found is not None
        known = {one.column: one.error is not None for one in found.coefficients}
        assert known == {"sex=m": False, "title=Ms": False, "age": True, "(intercept)": False}
        assert "-: the rows do not determine it" in as_text(coefficients_table(found))


def test_the_coefficients_predict_what_the_model_predicts() -> None:
    """In the units of the table: the global model of two classes."""
    data = load("heart")
    result = copfl.run("levels", data, rivals=False)
    assert result.coefficients is not None
    values = {one.column: one.in_model for one in result.coefficients.coefficients}
    file = read_table(Path(published.__file__).parent / "embedded" / "heart.csv")
    texts = row_texts(file)
    complete = [n for n in range(len(file)) if all(texts[c][n] for c in file.columns)][:20]
    model = result.global_model()
    for n in complete:
        odds = values["(intercept)"]
        for encoder in data.table.columns:
            cell = texts[encoder.name][n]
            odds += (
                values.get(f"{encoder.name}={cell}", 0.0)  # of the category that others are compared with
                if encoder.categories
                else values[encoder.name] * float(cell)
            )
        numbers = {e.name: file.columns[e.name] for e in data.table.columns}
        x = torch.from_numpy(encoded(data.table.columns, DataTable(numbers), np.array([n])))
        with torch.no_grad():
            logits = model(x)[0]
        assert float(logits[1] - logits[0]) == pytest.approx(odds, abs=1e-3)


@pytest.mark.job
def test_bundles_predict_as_the_run_did(tmp_path: Path) -> None:
    result = copfl.run("levels", "heart", rounds=4, out=tmp_path / "run")
    federation = result.experiment.federation
    for client in range(4):
        rows = federation.dataset.test.take(federation.partition.test[client])
        bundle = copfl.load(tmp_path / "run", client)
        assert np.float32(bundle.score(bundle.outputs(rows.x), rows.y)) == np.float32(
            result.final("accuracy")[client]
        )


# -- what it obeys and refuses -------------------------------------------------------------------------------


@pytest.mark.job
@pytest.mark.parametrize(
    "algorithm",
    [
        Levels(varying="all"),
        *(pytest.param(one, marks=slow) for one in (Levels(varying="none"), Levels(alone=True))),
    ],
    ids=str,
)
def test_every_variant_obeys_the_contract(algorithm: Levels) -> None:
    check_algorithm(algorithm, rounds=2, batch=6)


def test_doubles_beside_single_weights_are_sent_as_they_are() -> None:
    sums, head = Upload(torch.rand(100, dtype=torch.float64)), wire.Head("upload", "run", "", 0, 0)
    assert torch.equal(wire.decode(wire.encode(sums, head, wire="fp32"), sums, head).record.sums, sums.sums)
    assert nbytes(sums, of=torch.float32) == 800
    assert nbytes(Upload(sums.sums.float()), of=torch.float32) == nbytes(sums) == 400


def test_attacks_noise_and_steps_of_the_server_are_refused() -> None:
    for settings in (
        {"attack": {"name": "noise"}},
        {"robust": {"name": "median"}},
        {"privacy": {"noise": 1.0}},
    ):
        with pytest.raises(UsageError, match=r"weights that a client sends|one model"):
            copfl.run("levels", "heart", rounds=1, **settings)
    with pytest.raises(UsageError, match="solves the equations"):
        copfl.run("levels", "heart", rounds=1, server={"name": "momentum"})


def test_slopes_of_each_site_are_found_where_they_differ() -> None:
    rng = np.random.default_rng(2)
    sizes = (30,) * 12
    site = np.repeat(np.arange(12), sizes)
    x = rng.normal(size=(360, 2))
    slopes = np.array([1.0, 0.0]) + rng.normal(size=(12, 2))
    y = (x * slopes[site]).sum(1) + 0.3 * rng.normal(size=360)
    federation = federation_of(Rows(x, y), "regression", "y", sizes)
    found = fitted(Levels(varying="all"), task_for("regression", 1, 2), federation)
    own = found.coefficients[0, 0, :2] + found.effects[:, 0, 0, :2]
    assert np.abs(own - slopes).max() < 0.25
    assert found.ratio[0, 1] * float(found.server.scale) == pytest.approx(slopes.var(), rel=0.4)


@pytest.mark.job
@pytest.mark.parametrize("seed", [2, 29, 40])
def test_variances_do_not_go_to_and_fro(seed: int) -> None:
    """Growth of animals, where plain Newton steps of the logarithms of the variances still change after ten rounds."""
    rng, animals, weeks = np.random.default_rng(seed), 30, 10
    site, week = np.repeat(np.arange(animals), weeks), np.tile(np.arange(weeks), animals)
    week = (week - week.mean()) / week.std()
    bend, by_growth, by_level = rng.uniform(0, 0.4), rng.uniform(0, 0.15), rng.uniform(0, 0.3)
    level, growth = by_level * rng.normal(size=animals), by_growth * rng.normal(size=animals)
    feed = week * (1 + 0.1 * rng.normal(size=animals)[site]) + 0.05 * rng.normal(size=len(site))
    start = rng.normal(size=animals)[site]
    y = (1 + growth[site]) * week + 0.2 * start + level[site] + bend * week**2
    rows = Rows(np.column_stack([week, feed, start]), y + 0.06 * rng.normal(size=len(site)))
    federation = federation_of(rows, "regression", "y", (weeks,) * animals)
    found = fitted(Levels(varying="all"), task_for("regression", 1, 3), federation, rounds=10)
    assert found.changes[-1] < 1e-9


@pytest.mark.job
def test_collinear_columns_have_a_solution() -> None:
    rows = values()
    doubled = Rows(np.column_stack([rows.x, rows.x[:, 0]]), rows.y)
    task, federation = task_for("regression", 1, 4), federation_of(doubled, "regression", "y")
    for algorithm in (Levels(), Levels(shrink=False)):
        found = fitted(algorithm, task, federation)
        assert np.isfinite(found.coefficients).all()
        # Both copies together have nearly the slope of the one column.
        alone = fitted(algorithm, task_for("regression", 1), federation_of(rows, "regression", "y"))
        both = found.coefficients[0, 0, 0] + found.coefficients[0, 0, 3]
        assert both == pytest.approx(alone.coefficients[0, 0, 0], abs=0.05)


def test_a_site_with_one_class_has_a_finite_intercept() -> None:
    rows = labelled()
    rows.y[SITE == 2] = 1
    found = fitted(Levels(), task_for("classification", 2), federation_of(rows, "classification", "ab"))
    assert np.isfinite(found.effects).all()
    assert found.effects[2].item() == found.effects.max() > 0


@pytest.mark.parametrize(
    "criterion",
    [
        classification(label_smoothing=0.1),
        classification(class_weights=(1, 2, 3, 4)),
        regression("huber"),
        multilabel((1.0, 2.0, 1.0, 1.0)),
        next_token(),
    ],
    ids=lambda criterion: criterion.kind,
)
def test_other_losses_are_refused(criterion: Any) -> None:
    task = task_of(Linear((3,), 4), 4, criterion=criterion)
    with pytest.raises(UsageError, match="by squared error, or classes and labels by plain"):
        Levels().server_init(task, 2)


def test_a_model_that_is_no_linear_layer_at_its_end_is_refused() -> None:
    with pytest.raises(UsageError, match="use --model linear"):
        Levels().server_init(task_of(nn.Sequential(nn.Linear(3, 2, bias=False)), 2), 2)
    with pytest.raises(UsageError, match="2,000 are the most"):
        Levels().server_init(task_of(Linear((500,), 10), 10), 2)
    with pytest.raises(UsageError, match=r"model.name='mlp' has layers before its last.*use linear"):
        copfl.run("levels", "heart", model="mlp", rounds=1)
    with pytest.raises(UsageError, match="has layers before its last"):
        copfl.run(Levels(), "heart", model=MLP((27,), 2), rounds=1)


@pytest.mark.job
def test_its_model_and_its_rounds_are_chosen_with_it(tmp_path: Path) -> None:
    result = copfl.run("levels", "heart", out=tmp_path / "run")
    run = result.experiment.run
    assert (run.model.name, run.run.rounds, run.partition.name) == ("linear", 16, "by_group")
    changes = [record["federation"]["coefficient_change"] for record in result.records]
    assert changes[-1] < 1e-4 < changes[0]
    assert result.accuracy[-1].mean() > 0.8
    assert copfl.run("levels", "heart", rounds=2).experiment.run.run.rounds == 2
