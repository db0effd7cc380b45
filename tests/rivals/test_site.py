"""The rivals of one site: by hand on tiny tables, degenerate sites, and what they may not see."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from copfl.data.samples import CLASSIFICATION, MULTILABEL, REGRESSION
from copfl.measures.calibration import frequencies
from copfl.measures.metrics import METRICS, surprises
from copfl.rivals.effort import FEWEST_TREES, FOLDS, MOST_TREES, ONE_PENALTY, PENALTIES, Effort, effort_of
from copfl.rivals.estimators import folds_of
from copfl.rivals.records import BOOSTED, CONSTANT, FOREST, LINEAR, SiteRows
from copfl.rivals.site import judged_by, site_rivals, values_on

ACCURACY, RMSE, AUC, F1, LOG_LOSS = (
    METRICS[name] for name in ("accuracy", "rmse", "auc", "macro_f1", "log_loss")
)
QUICK = Effort(PENALTIES, FEWEST_TREES, FEWEST_TREES, 1.0)
ALL = [CONSTANT, LINEAR, FOREST, BOOSTED]


def two_classes(train: int = 60, test: int = 30, seed: int = 0) -> SiteRows:
    """Rows whose class is the sign of the first of three columns."""
    rng = np.random.default_rng(seed)
    x, x_test = rng.normal(size=(train, 3)), rng.normal(size=(test, 3))
    return SiteRows(x, (x[:, 0] > 0).astype(np.int64), x_test, (x_test[:, 0] > 0).astype(np.int64))


def of(rows: SiteRows, kind: str = CLASSIFICATION, classes: int = 2, seed: int = 0) -> Any:
    metric = {CLASSIFICATION: ACCURACY, REGRESSION: RMSE, MULTILABEL: F1}[kind]
    return site_rivals(rows, kind, classes, metric, QUICK, seed)


def test_every_model_learns_what_can_be_learned() -> None:
    rows = two_classes()
    found = of(rows)
    assert list(found) == ALL
    values = values_on(found, ACCURACY, rows.y_test)
    share = (rows.y.sum() + 0.5) / (len(rows.y) + 1)
    assert np.allclose(found[CONSTANT].answers, [1 - share, share])
    assert values[CONSTANT] == pytest.approx(np.mean(rows.y_test == (share > 0.5)))
    for name in (LINEAR, FOREST, BOOSTED):
        assert values[name] > 0.8, name
        assert found[name].validated > 0.8, name
        assert np.allclose(found[name].answers.sum(1), 1)


def test_the_constant_answer_of_values_is_the_mean() -> None:
    x = np.arange(4.0)[:, None]
    rows = SiteRows(x, np.array([1.0, 2.0, 3.0, 6.0]), x, np.array([3.0, 3.0, 3.0, 7.0]))
    found = of(rows, REGRESSION, 1)
    assert found[CONSTANT].answers.tolist() == [3.0] * 4
    assert values_on(found, RMSE, rows.y_test)[CONSTANT] == pytest.approx(2.0)  # root of 16 / 4


def test_a_linear_model_of_values_is_a_ridge_regression_that_finds_a_line() -> None:
    x = np.linspace(-1, 1, 50)[:, None]
    rows = SiteRows(x, 3 * x[:, 0] + 1, x, 3 * x[:, 0] + 1)
    found = of(rows, REGRESSION, 1)
    assert values_on(found, RMSE, rows.y_test)[LINEAR] < 0.05 * values_on(found, RMSE, rows.y_test)[CONSTANT]
    assert found[LINEAR].validated < 0.05


@pytest.mark.parametrize("train", [1, 2, 3])
def test_a_site_with_hardly_any_row_has_rivals(train: int) -> None:
    found = of(two_classes(train, 5))
    assert list(found) == ALL
    for rival in found.values():
        assert rival.answers.shape == (5, 2)
        assert np.isfinite(rival.answers).all()
        assert math.isnan(rival.validated) == (train == 1)


def test_of_one_class_every_rival_is_the_constant_answer() -> None:
    rows = two_classes()._replace(y=np.ones(60, np.int64))
    for name, rival in of(rows).items():
        assert np.allclose(rival.answers, [0.5 / 61, 60.5 / 61]), name  # as if one more row were half of each
        assert rival.validated == 1.0


def test_of_one_value_every_rival_is_that_value() -> None:
    rows = two_classes()
    rows = rows._replace(y=np.full(60, 2.5), y_test=np.full(30, 2.5))
    for rival in of(rows, REGRESSION, 1).values():
        assert np.allclose(rival.answers, 2.5)
        assert rival.validated == pytest.approx(0)


def test_a_class_with_one_row_and_a_class_with_none() -> None:
    rows = two_classes()
    y = rows.y.copy()
    y[0] = 2
    found = of(rows._replace(y=y), classes=4)
    for name, rival in found.items():
        assert rival.answers.shape == (30, 4)
        assert np.allclose(rival.answers.sum(1), 1), name
        expected = 0.25 / (61 * (QUICK.forest + 1) if name == FOREST else 61)
        assert np.allclose(rival.answers[:, 3], expected), name  # a class without rows is not impossible


def test_constant_columns_and_no_test_rows_are_no_error() -> None:
    rows = two_classes()
    assert values_on(of(rows._replace(x=np.ones((60, 3)), x_test=np.ones((30, 3)))), ACCURACY, rows.y_test)
    empty = of(rows._replace(x_test=np.zeros((0, 3)), y_test=np.zeros(0, np.int64)))
    assert {rival.answers.shape for rival in empty.values()} == {(0, 2)}


@pytest.mark.parametrize("kind", [CLASSIFICATION, REGRESSION])
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    rows = two_classes()
    rows = rows if kind == CLASSIFICATION else rows._replace(y=rows.x[:, 0])
    first, second = of(rows, kind, seed=3), of(rows, kind, seed=3)
    for name in ALL:
        assert first[name].answers.tobytes() == second[name].answers.tobytes()
        assert first[name].validated == second[name].validated
    other = of(rows, kind, seed=4)
    assert first[FOREST].answers.tobytes() != other[FOREST].answers.tobytes()


def test_labels_are_answered_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4))
    y = (x[:, :2] > 0).astype(np.float32)
    rows = SiteRows(x[:60], y[:60], x[60:], y[60:])
    found = of(rows, MULTILABEL, 2)
    assert {rival.answers.shape for rival in found.values()} == {(20, 2)}
    assert np.allclose(found[CONSTANT].answers, (y[:60].sum(0) + 0.5) / 61)
    assert values_on(found, F1, rows.y_test)[LINEAR] > 0.8


def test_several_values_are_answered_one_by_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    rows = SiteRows(x[:50], x[:50] * [1, 10], x[50:], x[50:] * [1, 10])
    found = of(rows, REGRESSION, 2)
    assert {rival.answers.shape for rival in found.values()} == {(10, 2)}
    assert values_on(found, RMSE, rows.y_test)[LINEAR] < 0.5


def test_texts_are_counts_of_words() -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(0.3, size=(90, 50)).astype(np.float64)
    y = rng.integers(0, 2, 90)
    counts[np.arange(90), y] += 3  # a word of each class
    rows = SiteRows(csr_array(counts[:60]), y[:60], csr_array(counts[60:]), y[60:])
    found = site_rivals(rows, CLASSIFICATION, 2, ACCURACY, QUICK._replace(forest=0, boosted=0), 0)
    assert list(found) == [CONSTANT, LINEAR]
    assert values_on(found, ACCURACY, rows.y_test)[LINEAR] > 0.9


def test_targets_of_test_rows_are_not_seen() -> None:
    rows = two_classes()
    other = of(rows._replace(y_test=1 - rows.y_test))
    for name, rival in of(rows).items():
        assert rival.validated == other[name].validated
        assert rival.answers.tobytes() == other[name].answers.tobytes()


def test_what_is_validated_is_of_models_that_did_not_see_the_row() -> None:
    """Classes without a relation to the columns are known by heart, and not in a cross-validation."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(120, 4)), np.arange(120) % 2
    found = of(SiteRows(x, y, x, y))  # the test rows are those that it trained on
    assert values_on(found, ACCURACY, y)[FOREST] > 0.95
    assert found[FOREST].validated < 0.7


def test_folds_are_of_equal_size_and_of_two_rows_there_are_two() -> None:
    assert np.ptp(np.bincount(folds_of(39, 0), minlength=FOLDS)) <= 1
    assert folds_of(2, 0).tolist() in ([0, 1], [1, 0])


@pytest.mark.job
def test_the_constant_answer_does_not_seem_better_at_small_sites_than_it_is() -> None:
    """Its cross-validated log loss is that of new rows; if folds had the classes of the site, it would be lower."""
    rng = np.random.default_rng(0)
    draws = rng.random((4000, 11)) < 0.3  # sites of ten rows, and a new one
    inside, new = [], []
    for row in draws.astype(np.int64):
        folds, y = folds_of(10, int(row @ 2 ** np.arange(11))), row[:10]
        answers = np.stack([frequencies(y[folds != fold], 2) for fold in folds])
        inside.append(surprises(answers, y).mean())
        new.append(surprises(frequencies(y[:8], 2)[None], row[10:])[0])
    error = np.std(np.subtract(inside, new)) / np.sqrt(len(draws))
    assert abs(np.mean(inside) - np.mean(new)) < 3 * error


def test_a_site_whose_rows_are_all_different_has_a_forest_out_of_the_bag() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), np.arange(60) % 2
    plain, marked = (of(SiteRows(x, y, x, y, unit))[FOREST].inside for unit in (None, np.arange(60) * 7))
    assert np.array_equal(plain, marked)


def test_log_loss_by_hand_and_bounded() -> None:
    answers, y = np.array([[0.5, 0.5], [0.75, 0.25]]), np.array([0, 1])
    assert LOG_LOSS.of(answers, y) == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert LOG_LOSS.of(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(23 * math.log(2))
    labels = np.array([[1.0, 0.0]])
    assert LOG_LOSS.of(np.array([[0.5, 0.5]]), labels) == pytest.approx(math.log(2))


def test_classes_are_judged_by_log_loss_and_auc_as_well() -> None:
    names = [metric.name for metric in judged_by(CLASSIFICATION, (ACCURACY,))]
    assert names == ["accuracy", "log_loss", "auc"]
    assert [metric.name for metric in judged_by(CLASSIFICATION, (AUC,))] == ["auc", "log_loss"]
    assert [metric.name for metric in judged_by(REGRESSION, (RMSE,))] == ["rmse"]


def test_the_effort_is_bounded_whatever_the_federation() -> None:
    few = effort_of([240, 235, 98, 160], 11, 1, values=False, trees=True)
    assert (few.penalties, few.forest, few.boosted) == (PENALTIES, MOST_TREES, MOST_TREES)
    for rows, columns, outputs in (([1000] * 10, 20, 1), ([20] * 300, 5, 1), ([10**6] * 300, 100, 10)):
        for values in (False, True):
            found = effort_of(rows, columns, outputs, values=values, trees=True)
            trees = (found.forest, found.boosted)
            assert all(n == 0 or FEWEST_TREES <= n <= MOST_TREES for n in trees)
            assert found.seconds < 31
    huge = effort_of([10**6] * 300, 100, 10, values=False, trees=True)
    assert huge == ((), 0, 0, 0.0, 0.0)
    assert effort_of([20] * 300, 5, 1, values=False, trees=True).penalties == ONE_PENALTY
    assert effort_of([100], 5, 1, values=False, trees=False)[1:3] == (0, 0)
