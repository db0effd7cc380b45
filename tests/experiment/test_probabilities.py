"""Log loss, AUC and calibration of the clients' models at the end of a run, and temperatures in bundles."""

from pathlib import Path

import numpy as np
import pytest

import copfl
from copfl.experiment import probabilities
from copfl.experiment.probabilities import PROBABILITIES, Probabilities, in_words
from copfl.experiment.result import Result
from copfl.measures.calibration import frequencies
from copfl.measures.metrics import METRICS


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return copfl.run("fedavg_ft", "wine", rounds=3, clients=3, validation=0.3, out=folder)


def test_equals_what_the_bundles_predict(validated: Result) -> None:
    e, found = validated.experiment, validated.probabilities
    assert found is not None
    assert validated.folder is not None
    data, partition = e.federation.dataset, e.federation.partition
    for n in range(e.clients):
        bundle = copfl.load(validated.folder, client=n)
        assert bundle.description.output.temperature == found.temperature[n] != 1
        chosen = partition.test[n]
        tested = partition.tested(data)
        evaluation = bundle.measured(bundle.outputs(tested.x[chosen]), tested.y[chosen])
        for name in probabilities.MEASURED:
            assert evaluation.metrics[name] == pytest.approx(getattr(found, name)[n], abs=1e-6, nan_ok=True)
        usual = frequencies(data.train.y[partition.train[n]], len(data.classes))
        expected = METRICS["log_loss"].of(np.tile(usual, (len(chosen), 1)), tested.y[chosen])
        assert found.reference[n] == pytest.approx(expected)
        assert not found.excess[n] > found.log_loss[n] - found.reference[n]


def test_the_module_has_the_temperature(validated: Result) -> None:
    import torch

    e = validated.experiment
    assert validated.folder is not None
    bundle = copfl.load(validated.folder, client=0)
    x = e.federation.dataset.train.x[:20]
    with torch.no_grad():
        of_module = bundle.module(torch.from_numpy(x)).numpy()
    assert of_module == pytest.approx(bundle.outputs(x), abs=1e-6)
    plain = copfl.Bundle(bundle.description, bundle.task, bundle.model)
    object.__setattr__(plain.description.output, "temperature", 1.0)
    assert not np.allclose(plain.outputs(x), of_module, atol=1e-3)


def test_the_file_has_what_the_result_has(validated: Result, tmp_path: Path) -> None:
    assert validated.folder is not None
    assert validated.probabilities is not None
    for path in (validated.folder, validated.save(tmp_path / "saved")):
        found = PROBABILITIES.read(path)
        assert found is not None
        for one, other in zip(found, validated.probabilities, strict=True):
            np.testing.assert_equal(one, other)
    assert PROBABILITIES.read(tmp_path) is None


@pytest.mark.job
def test_without_validation_samples_there_is_no_temperature() -> None:
    found = copfl.run("fedavg", "wine", rounds=1, clients=3).probabilities
    assert found is not None
    assert (found.temperature == 1).all()


@pytest.mark.job
def test_values_have_no_probabilities() -> None:
    assert copfl.run("fedavg", "diabetes", rounds=1, clients=3).probabilities is None


def test_worse_than_frequencies_is_named() -> None:
    nan = np.nan
    found = Probabilities(
        log_loss=np.array([1.02, 0.3, nan]),
        auc=np.array([0.5, 0.9, nan]),
        calibration_error=np.array([0.2, 0.1, nan]),
        reference=np.array([0.69, 0.69, nan]),
        excess=np.array([0.1, -0.5, nan]),
        temperature=np.ones(3),
        calibration=(),
    )
    assert found.worse == [0]
    means, named = in_words(found, ["north", "south", "west"])
    assert means == (
        "Probabilities, mean over sites: log loss 0.660 (class frequencies in training: 0.690), AUC 70.0 %, "
        "calibration error 15.0 %."
    )
    assert "of the test samples: north (1.02; frequencies 0.690)." in named
    _, unsure = in_words(found._replace(excess=np.array([-0.1, -0.5, nan])), ["north", "south", "west"])
    assert unsure.startswith("1 site of 3: probabilities that are not shown to be better")
    assert not in_words(found._replace(log_loss=np.full(3, nan)), ["", "", ""])
