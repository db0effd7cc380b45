"""The options of `copfl federate init` are settings that a federation can have."""

from __future__ import annotations

from copfl.cli.options import settings
from copfl.settings.policy_lines import Simulated
from copfl.settings.record import declared
from copfl.settings.schema import KINDS


def test_init_has_no_option_that_a_federation_refuses_in_any_case() -> None:
    offered = {(option.kind, option.key) for option in settings("init")}
    simulated = {
        (kind, field.name)
        for kind, record in KINDS.items()
        for field in declared(record)
        if isinstance(field.metadata["policy"], Simulated)
    }
    assert ("run", "patience") in simulated
    assert not offered & simulated
