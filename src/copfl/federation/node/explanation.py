"""What a node would do with the requests of an app, in lines that its owner reads.

`copfl site policy --app`, `copfl site approve` and `copfl site join` print them. Without torch, unless noise is added.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from copfl.federation.node.ledger import spent
from copfl.federation.policy.record import Policy
from copfl.federation.policy.request import DEFAULTS, refusals
from copfl.settings.flat import nested
from copfl.settings.schema import RunSettings
from copfl.settings.toml import Tables


def explained(policy: Policy, run_config: Mapping[str, Any], state_dir: Path | None = None) -> list[str]:
    """What a node with this policy does with the requests of an app: a line each, refusals first.

    Args:
        policy: The node's.
        run_config: The app's.
        state_dir: The node's folder, which has what its data have spent.
    """
    refused = refusals(policy, run_config)
    lines = [f"refused     {refusal.why}  [{refusal.line}]" for refusal in refused]
    if refused:
        return lines
    tables = nested(run_config)
    is_secure = tables.get("secure", {}).get("aggregation", False)
    metrics = {"all": "are sent", "none": "stay here  [reports]"}
    metrics["sums"] = "are sent in secure sums" if is_secure else metrics["none"]
    may_return = "is answered" if policy.rollback else "is refused  [rollback]"
    bounds, proposals = policy.bounds, policy.proposals
    algorithm, model = (tables.get(title, {}).get("name") for title in ("algorithm", "model"))
    rounds = tables.get("run", {}).get("rounds", RunSettings.rounds)
    signers = ", ".join(proposals.coordinators) or "--coordinator"
    consent = "its owner approves each  [proposals.by_hand]" if proposals.by_hand else f"signed by {signers}"
    allowed = f"{algorithm or 'copfl'} with {model or 'cnn'}, {rounds} rounds"
    if candidates := tables.get("choice", {}).get("candidates"):
        allowed = f"{' or '.join(candidates.split(','))}, {rounds} rounds, by losses of rows that this site holds out"
    if tables.get("session", {}).get("agree"):
        count = policy.statistics.smallest_count
        how = "masked, in sums over all members" if is_secure else "for the server to see"
        allowed = f"no training; sums and categories of at least {count} rows, {how}  [statistics]"
    return [
        f"allowed     {allowed}",
        f"proposals   {'also unsigned  [proposals.unsigned]' if proposals.unsigned else consent}",
        f"metrics     {metrics[policy.reports]}",
        *(
            ["benefit     two losses a round are sent  [benefit]"]
            if tables.get("run", {}).get("benefit")
            else []
        ),
        f"rollback    {may_return}",
        f"a request   may take {bounds.seconds:g} s and {bounds.memory:g} GiB  [bounds]",
        *_privacy_lines(policy, tables, state_dir),
    ]


def _privacy_lines(policy: Policy, tables: Tables, state_dir: Path | None) -> list[str]:
    """What the node's data have spent, and what they will have after all rounds of the app."""
    folder, noise = state_dir or Path(os.devnull), float(tables.get("privacy", {}).get("noise", 0.0))
    before = spent(folder, policy.privacy)
    lines = [f"privacy     {before}"] if before else []
    if not noise:
        return lines
    from copfl.core.batches import participants

    run = {**DEFAULTS["run"], **tables.get("run", {})}
    selected = participants(run["clients"], run["participation"])
    each = noise if tables.get("secure", {}).get("aggregation") else noise / selected**0.5
    after = spent(folder, policy.privacy, *[each] * int(run["rounds"]))
    if after and after.epsilon is not None:
        is_over = policy.privacy.lifetime_epsilon and after.epsilon > policy.privacy.lifetime_epsilon
        refused = f", and {after.limit:g} is the limit: later rounds are refused" if is_over else ""
        lines.append(f"privacy     epsilon {after.epsilon:.3g} after all rounds{refused}  [privacy]")
    return lines
