"""What of the table [samples] follows from a data contract, and whether one contract completes another.

`init` and `agree` write the table with it. A site that consented to an open contract accepts, without being asked
again, what the members agreed on since.
"""

import dataclasses
from typing import Any

from copfl.data.contract.contract import Column, Contract
from copfl.data.samples import CLASSIFICATION, SURVIVAL


def samples_of(contract: Contract) -> dict[str, Any]:
    """What of [samples] follows from a contract; before it is frozen, with two classes and few categories."""
    outputs = contract.outputs
    is_named = contract.task == CLASSIFICATION and outputs != tuple(map(str, range(len(outputs))))
    means, deviations = contract.scale
    # Of survival the objective says how many outputs there are.
    counted = (
        {}
        if contract.task == SURVIVAL
        else {"classes": outputs if outputs and is_named else len(outputs) or 2}
    )
    return {
        **counted,
        "target_mean": means,
        "target_std": deviations,
        "contract": contract.as_json(),
        **({"shape": (contract.width,)} if contract.features else {}),
    }


def completes(frozen: Contract, opened: Contract) -> bool:
    """Whether a contract is another one with the means and categories that were left open, and no other change.

    Args:
        frozen: The one that may be the result of an agreement.
        opened: The one on whose rest the members were to agree.
    """
    left_open = {column.name: column for column in opened.open}

    def as_before(column: Column) -> Column:
        before = left_open.get(column.name)
        if before is None or (before.candidates and not set(column.categories) <= set(before.candidates)):
            return column
        agreed_fields = ("mean", "deviation", "categories", "candidates")
        return dataclasses.replace(column, **{field: getattr(before, field) for field in agreed_fields})

    columns, targets = (tuple(map(as_before, group)) for group in (frozen.columns, frozen.targets))
    return frozen.is_frozen and dataclasses.replace(frozen, columns=columns, targets=targets) == opened
