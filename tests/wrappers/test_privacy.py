"""The noise and the clipping by hand, what is withheld, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from copfl.algorithms import ALGORITHMS
from copfl.algorithms.copfl import COPFL
from copfl.algorithms.fedavg import FedAvg
from copfl.choosing.run import run
from copfl.core import UsageError, tree
from copfl.core.algorithm import example_output, traits
from copfl.core.batches import plan
from copfl.testing import check_algorithm, small_federation
from copfl.wrappers.addons import with_addons
from copfl.wrappers.privacy import Private, check_sums, epsilon
from tests.commands import called
from tests.kinds import quick

pytest.importorskip("dp_accounting", reason="the accountant is an extra")


def turn(algorithm: Any, n: int = 0) -> tuple[Any, Any]:
    """One client's message and its turn."""
    task, federation = small_federation("none", (5, 9))
    order = plan(0, 0, [n], federation.train.sizes[[n]], batch=4, epochs=algorithm.total_epochs, augment=True)
    down = tree.row(algorithm.downlink(algorithm.server_init(task, 2), torch.tensor([n])), 0)
    data = tree.row(federation.train.rows([n]), 0)
    with torch.no_grad():
        return down, algorithm.client_update(
            task, algorithm.client_init(task), down, data, tree.row(order, 0)
        )


def test_an_update_is_clipped_and_its_size_withheld() -> None:
    down, open_ = turn(FedAvg())
    _, private = turn(Private(FedAvg(), 2, 2, clip=0.01, noise=1e-9))
    change, clipped = open_.upload.w - down.w, private.upload.w - down.w
    assert float(change.norm()) > 0.01
    assert float(clipped.norm()) == pytest.approx(0.01)
    assert torch.allclose(clipped, change * 0.01 / change.norm(), atol=1e-9)
    assert (open_.upload.size.item(), private.upload.size.item()) == (5, 1)
    _, loose = turn(Private(FedAvg(), 2, 2, clip=1e3, noise=1e-12))
    assert torch.allclose(loose.upload.w, open_.upload.w, atol=1e-6)


def test_the_noise_of_all_adds_up_to_what_was_asked() -> None:
    clip, noise, together = 0.5, 3.0, 4
    algorithm = Private(FedAvg(), 9, together, clip=clip, noise=noise)
    down, given = turn(algorithm)
    drawn = given.upload.w - down.down.w
    _, quiet = turn(Private(FedAvg(), 9, together, clip=clip, noise=1e-12))
    drawn = drawn - (quiet.upload.w - down.down.w)
    assert float(drawn.std()) == pytest.approx(noise * clip / math.sqrt(together), rel=0.15)
    assert not torch.equal(turn(algorithm, 1)[1].upload.w, given.upload.w)


def test_masks_and_scores_do_not_travel() -> None:
    """CO-PFL's mask grows in the first round; the upload's is the one that everybody has from the start."""
    _, open_ = turn(COPFL())
    down, private = turn(Private(COPFL(), 2, 2, clip=1e3, noise=1e-12))
    grown = open_.upload.shared.personal
    assert grown.any()
    assert not private.upload.shared.personal.any()
    assert torch.allclose(
        private.upload.shared.values[grown], down.down.w[grown], atol=1e-6
    )  # as if unchanged
    assert torch.allclose(private.upload.shared.values[~grown], open_.upload.shared.values[~grown], atol=1e-6)
    assert (private.upload.score.item(), private.client.score.item()) == (1, 1)
    assert open_.upload.score.item() != 1
    assert torch.equal(private.client.mask, open_.client.mask)  # the client has its own


def test_a_client_whose_training_broke_sends_noise_and_keeps_its_record() -> None:
    from copfl.core.optim import Sgd

    down, given = turn(Private(FedAvg(Sgd(lr=1e300)), 2, 2, clip=1.0, noise=1.0))
    assert torch.isfinite(given.upload.w).all()
    assert float((given.upload.w - down.down.w).std()) == pytest.approx(1 / math.sqrt(2), rel=0.15)
    assert tree.finite(given.client)


@dataclass(frozen=True)
class FromEndToEnd(FedAvg):
    """One weight goes from nearly the lowest number to nearly the largest: both are finite, their difference is not."""

    def downlink(self, server: Any, ids: torch.Tensor) -> Any:
        down = super().downlink(server, ids)
        lowest = torch.full_like(down.w[:, :1], -0.9 * torch.finfo(down.w.dtype).max)
        return down._replace(w=torch.cat([lowest, down.w[:, 1:]], 1))

    def client_update(self, task: Any, client: Any, down: Any, *further: Any) -> Any:
        output = super().client_update(task, client, down._replace(w=task.initial), *further)
        return output._replace(upload=output.upload._replace(w=torch.cat([-down.w[:1], output.upload.w[1:]])))


def test_a_change_that_overflows_is_no_more_visible_than_a_broken_training() -> None:
    """The upload was not a number, and the node refused: a bit about its data without noise."""
    down, private = turn(Private(FromEndToEnd(), 2, 2, clip=1.0, noise=1.0))
    assert torch.isfinite(private.upload.w).all()
    assert float((private.upload.w - down.down.w)[1:].std()) == pytest.approx(1 / math.sqrt(2), rel=0.15)


@pytest.mark.job
@pytest.mark.parametrize("name", quick(["copfl", "fedper"], ["copfl"]))
def test_it_is_an_algorithm_like_any_other(name: str) -> None:
    check_algorithm(Private(ALGORITHMS[name](), 4, 4, seed=2), rounds=2, batch=6, norm="none")


# -- the accountant ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (4.0, 10), (20.0, 100)])
def test_epsilon_lies_between_the_exact_one_and_the_simple_bound(noise: float, rounds: int) -> None:
    """Rounds of normal noise compose to one with the noise over sqrt(rounds), of which the exact epsilon is known."""
    from dp_accounting import get_epsilon_gaussian

    delta, z = 1e-5, noise / 2 / math.sqrt(rounds)  # the sensitivity is twice the clip
    simple = min(
        a / (2 * z * z) + math.log(1 / delta) / (a - 1) for a in (1.1, 1.25, 1.5, 1.75, *range(2, 17), 32, 64)
    )
    assert get_epsilon_gaussian(z, delta) <= epsilon(noise, rounds, delta) <= simple


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_sampling() -> None:
    assert epsilon(4.0, 10, 1e-5) < epsilon(4.0, 11, 1e-5)
    assert epsilon(8.0, 10, 1e-5) < epsilon(4.0, 10, 1e-5)
    assert epsilon(4.0, 10, 1e-5, clients=100, taking_part=10) < 0.5 * epsilon(4.0, 10, 1e-5)


def test_a_run_says_what_it_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--rounds", 2, "--engine", "vmap", "--model", "mlp", "--out", tmp_path / "run", "-a", "fedavg")
    done = called(capsys, "run", "--privacy", 4, "--set", "privacy.clip=0.5", *options)
    assert done.code == 0, done.err
    # Whoever sees the global models may be one of the ten, and knows a tenth of the noise.
    spent = epsilon(4.0 * math.sqrt(0.9), 2, 1e-5, 10, 10), epsilon(4.0 / math.sqrt(10), 2, 1e-5)
    words = " ".join(done.out.split())
    assert f"epsilon {spent[0]:.1f} towards those who see the global models" in words
    assert f"{spent[1]:.1f} towards a server that sees each upload" in words
    assert "[privacy]\nnoise = 4.0\nclip = 0.5\ndelta = 1e-05" in (tmp_path / "run" / "run.toml").read_text()


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fedpac", {}, "needs single uploads"),
        ("fedcalm", {}, "needs single uploads"),
        ("copfl", {"robust": {"name": "median"}}, "needs single uploads"),
        ("splitnn", {}, "also sends messages during local training"),
        ("scaffold", {}, "also sends control"),
        ("feddbe", {}, "also sends mean"),
        ("player_fl", {}, "also sends sensitivity"),
        ("ifca", {}, "also sends cluster"),
        ("ktpfl", {}, "needs single uploads|weights that a client sends"),
        ("fedavg", {"clip": 0.0}, "clip=0.0 must be a number above 0"),
        ("fedavg", {"delta": 1.0}, "below 1"),
    ],
)
def test_no_epsilon_is_printed_where_none_holds(name: str, options: dict[str, Any], why: str) -> None:
    robust = {key: value for key, value in options.items() if key == "robust"}
    privacy = {"noise": 1.0, **{key: value for key, value in options.items() if key != "robust"}}
    with pytest.raises(UsageError, match=why):
        run(name, rounds=1, model="mlp", engine="vmap", privacy=privacy, **robust)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_epsilon_is_given_only_where_the_server_needs_one_sum(name: str) -> None:
    """FedEx-LoRA also adds up the products B A of the noised factors, which no noised sum determines."""
    algorithm = ALGORITHMS[name]()
    how = traits(algorithm)
    task, federation = small_federation("none", (5, 9), needs=how.needs, trains=how.trains)
    upload = example_output(algorithm, task, tree.row(federation.train.rows([0]), 0), clients=2).upload
    reasons = dict.fromkeys(("fedcalm", "fedpac", "ktpfl", "reads"), "needs single uploads")
    reasons |= dict.fromkeys(("fedex_lora", "flex_lora"), "another function of each upload")
    if name in reasons:
        with pytest.raises(UsageError, match=reasons[name]):
            check_sums(algorithm, task, upload)
    else:
        check_sums(algorithm, task, upload)


def test_the_withheld_weight_is_not_that_of_a_moving_average() -> None:
    """After one round the weights of the average add up to 1 - 0.9, whatever the server is told."""
    _, private = turn(Private(with_addons(FedAvg(), ema=0.9), 2, 2, clip=1e3, noise=1e-12))
    assert private.client.weight.item() == pytest.approx(0.1)
