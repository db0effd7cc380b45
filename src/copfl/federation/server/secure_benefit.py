"""The benefit under secure aggregation: the sum, after the last round, of what the clients conclude."""

import time
from typing import Any

import numpy as np

from copfl import wire
from copfl.errors import WireError
from copfl.experiment import records
from copfl.experiment.analysis.benefit import design, of_sum
from copfl.federation.protocol.files import write_json
from copfl.federation.protocol.halves import (
    BENEFIT,
    COMPARED,
    MESSAGE,
    judgement_from,
    memberships,
    question_of,
    size_of,
)
from copfl.federation.protocol.messages import Field, read_json
from copfl.federation.server.exchange import Round
from copfl.federation.server.secure_exchange import REVEALING, Question, SecureExchange
from copfl.tables import plain
from copfl.wire import Packet


def conclude(exchange: SecureExchange) -> None:
    """Writes the benefit, from the sum of what clients conclude; the log says why where there is none.

    Of the rounds in which every client has compared the same models.
    """
    clients, lines = exchange.federation.clients, exchange.folder.rounds()
    path = exchange.folder.path / BENEFIT
    if read_json(path).get("rounds") == len(lines):
        return
    compared = records.table(lines, COMPARED, clients)
    is_common = np.array([len(line.get(MESSAGE, {}).get("sha256", ())) == 1 for line in lines])
    rounds: list[int] = np.flatnonzero(is_common & (np.nan_to_num(compared) > 0).all(axis=1)).tolist()
    regression = design(memberships(exchange.federation, rounds))
    if regression is None:
        exchange.log(
            f"{len(rounds)} rounds in which all {clients} clients compared halves do not give a benefit"
        )
        return
    messages = [lines[round][MESSAGE]["sha256"][0] for round in rounds]
    asked = question_of(rounds, messages)
    number = exchange.federation.rounds

    def down(client: int, **further: Any) -> Packet:
        about = {Field.ROUNDS: len(asked.rounds), **further}
        return wire.encode(asked, exchange.head("down", number, client), about=about)

    needed = max(exchange.federation.minimum, exchange.rules.threshold)
    question = Question(down, size_of(len(rounds), clients), needed)
    values, why = None, "too few clients revealed their shares"
    until = time.monotonic() + exchange.federation.network.deadline
    while values is None and time.monotonic() < until:
        try:
            connected = exchange.connected(number, list(range(clients)), needed, until)
            values = exchange.added_up(Round(number), connected, question)
        except WireError as error:
            why = str(error)
            exchange.log(f"the benefit is asked for again with fresh keys: {error}")
            time.sleep(min(exchange.retry, 5.0))
        finally:  # it may be asked for again: the same sum of the same clients
            (exchange.folder.path / REVEALING).unlink(missing_ok=True)
    if values is None:
        exchange.log(f"there is no benefit: {why}; session.resume=true asks for it again")
        return
    try:
        judgement = judgement_from(values, len(rounds), clients, exchange.rules)
    except WireError as error:
        exchange.log(f"there is no benefit: {error}")
        return
    benefit = of_sum(judgement, regression.freedom)
    write_json(path, {"rounds": len(lines), **plain(benefit._asdict())})
    exchange.log(f"the benefit of {clients} clients, from {len(rounds)} rounds, is in {BENEFIT}")
