"""Lessons on public samples, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from copfl.errors import UsageError
from copfl.parts.transfer import coefficients_after, distillation, lesson, public_of, softened
from tests.algorithms.chain import chain, vector


def test_softened_answers_by_hand() -> None:
    found = softened(chain(2.0, 1.0), vector(2.0, 1.0), vector(1.0, -3.0)[:, None], temperature=4.0)
    assert found[:, 1].tolist() == pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(1.5))])


@pytest.mark.parametrize("ready", [True, False])
def test_a_lesson_is_every_sample_once_in_steps(ready: bool) -> None:
    teacher = torch.full((5, 2), 0.5)
    data, steps = lesson(torch.arange(5.0)[:, None], teacher, torch.tensor(ready), batch=2)
    assert [step.index.tolist() for step in steps] == [[0, 1], [2, 3], [4]]
    assert all(step.valid is not None and step.valid.tolist() == [ready] * len(step.index) for step in steps)
    assert int(data.size) == 5
    assert data.y is teacher


def test_the_distance_by_hand() -> None:
    """The own answer is (1/2, 1/2) whatever the temperature; a certain teacher costs log 2, an equal one nothing."""
    teacher = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    loss = distillation(3.0)(torch.zeros(2, 2), torch.zeros(2, 1), teacher, torch.tensor([True, False]))
    assert float(loss) == pytest.approx(math.log(2))
    assert float(distillation(3.0)(torch.zeros(2, 2), torch.zeros(2, 1), teacher, None)) == pytest.approx(
        math.log(2) / 2
    )


def test_a_step_leaves_the_sum_of_a_row() -> None:
    draw = torch.Generator().manual_seed(0)
    answers = torch.rand(4, 3, 2, dtype=torch.float64, generator=draw).softmax(2)
    c = torch.full((4, 4), 0.25, dtype=torch.float64)
    after = coefficients_after(c, answers, torch.ones(4, dtype=torch.bool), 0.1)
    torch.testing.assert_close(after.sum(1), torch.ones(4, dtype=torch.float64))
    assert (after.diagonal() > 0.25).all()  # everybody answers like nobody so much as like oneself


def test_without_public_samples_it_says_so() -> None:
    task = chain(1.0, 1.0)
    with pytest.raises(UsageError, match="needs public samples"):
        public_of(task)
    assert public_of(dataclasses.replace(task, public=torch.ones(2, 1))).shape == (2, 1)
