"""What the machines of a federation agree on to add up statistics, and the form of their messages.

The members of an open data contract give sums of their tables before the training: `server.statistics` asks,
`node.statistics` answers, and both make their terms here.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from copfl.data.contract.contract import Contract
from copfl.data.contract.statistics import ContractQuestion, Vector
from copfl.errors import DataError, UsageError, WireError, raised_as
from copfl.federation.protocol.secure_sum import Rules
from copfl.federation.protocol.settings import Terms, contract_of, federation_of

KIND = "statistics"  # of a node's answer
# Sums are of values in -1 to 1: rows up to 2**24, in steps of 2**-23.
RANGE, BITS = 2.0**24, 48
LARGEST = 1e100  # of a sum of squares: numbers of a table have 1e30 at most


@dataclass(frozen=True, eq=False)
class StatisticsTerms(Terms):
    """What the machines agree on to add up statistics."""

    contract: Contract
    question: ContractQuestion

    @property
    def rules(self) -> Rules:
        """The rules of the secure sum: all members are in it."""
        secure = self.federation.secure
        return Rules(self.federation.clients, 0, RANGE, BITS, secure.neighbours)

    @property
    def digest(self) -> str:
        """Of all that determines what a node gives."""
        contract, question = self.contract, self.question
        numbers = [(column.name, column.minimum, column.maximum) for column in question.numbers]
        named = [(column.name, column.candidates) for column in (*question.listed, *question.free)]
        used = contract.target_names, [column.name for column in contract.columns], contract.missing
        run = self.federation.run.run
        held_out = [[run.validation, run.seed]] if run.validation else []
        content = [numbers, named, used, contract.task, *held_out]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def terms_of(run_config: Mapping[str, Any]) -> StatisticsTerms:
    """The terms that a run config describes; UsageError if its contract leaves nothing open, or too much."""
    federation = federation_of(run_config)
    if not federation.samples.contract:
        raise UsageError("the federation has no data contract; make one with `copfl federate contract`")
    contract = contract_of(federation.samples.contract)
    if contract.is_frozen:
        raise UsageError("the data contract is frozen: it leaves nothing to agree on")
    if federation.run.privacy:
        raise UsageError(
            "the uploads of this federation have noise, and sums for encoders have none, which would void "
            "its epsilon: give the means, deviations and categories in the contract"
        )
    with raised_as(UsageError, "{}", DataError):
        question = ContractQuestion.of(contract)
    if federation.secure.aggregation:
        without_range = [c.name for c in question.numbers if c.minimum is None or c.maximum is None]
        if question.free:
            raise UsageError(
                f'the categories of "{question.free[0].name}" are open, and a secure sum is of numbers: list '
                "them in the contract as categories, or as candidates of which those are kept that a site has"
            )
        if without_range:
            raise UsageError(
                f'"{without_range[0]}" needs a minimum and a maximum in the contract: a secure sum has a '
                "fixed step"
            )
    return StatisticsTerms(federation, f"statistics-{contract.digest}", contract, question)


def like_centres(question: ContractQuestion) -> torch.Tensor:
    """The form of the server's message: a number for each column of numbers."""
    return torch.zeros(max(len(question.numbers), 1), dtype=torch.float64)


def vector_of(record: torch.Tensor) -> Vector:
    """The numbers of a node's answer; WireError if one is none, or so large that no table gives it."""
    vector: Vector = np.asarray(record.numpy(), np.float64)
    if not (np.abs(vector) <= LARGEST).all():  # of two finite ones the mean may be infinite, which all refuse
        raise WireError("its sums are larger than any table's")
    return vector
