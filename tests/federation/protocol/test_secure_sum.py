"""SecAgg+ without messages: the sum is the plain one, whoever is lost, and a masked vector is noise."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest

from copfl.errors import UsageError, WireError
from copfl.federation.protocol import secret_sharing, secure_graph, secure_sum
from copfl.federation.protocol.secure_sum import Floats, MaskedSum, Rules, Secrets, neighbours, quantised
from tests.slow import slow

pytest.importorskip("flwr", reason='Flower is not installed: pip install "copfl[flower]"')

LOST = {phase: {1, 4, 7} for phase in secure_sum.PHASES}
AFTER = ("consistent", "revealed")  # phases after the vectors have been sent


def total(values: dict[int, Floats], rules: Rules, lost: Mapping[str, Collection[int]]) -> Floats:
    """The sum after all phases, of which some clients leave in some phases."""

    def left(phase: str, clients: Collection[int]) -> list[int]:
        return [n for n in clients if n not in lost.get(phase, ())]

    begun = {n: secure_sum.begin(n) for n in left("keys", values)}
    linked = neighbours(sorted(begun), rules.neighbours)
    server = MaskedSum(rules, {n: keys for n, (_, keys) in begun.items()}, linked, {}, {})
    secrets: dict[int, Secrets] = {}
    for n in left("shares", begun):
        secrets[n], server.sealed[n] = secure_sum.share(begun[n][0], server.keys_for(n), rules)
        server.commitments[n] = secure_sum.commitment(secrets[n].seed)
    for n in left("masked", secrets):
        words = quantised(values[n], rules)
        secrets[n], content = secure_sum.mask(secrets[n], server.sealed_for(n), words, rules, b"")
        server.add(n, content, len(words))
    survivors = server.survivors
    signed = left("consistent", survivors)
    revealed = {n: secure_sum.reveal(secrets[n], survivors, rules) for n in left("revealed", signed)}
    return server.total(revealed)


def vectors(clients: int, size: int = 50) -> dict[int, Floats]:
    random = np.random.default_rng(3)
    return {n: random.normal(size=size) * 10.0 ** random.integers(-3, 3, size) for n in range(clients)}


@pytest.mark.parametrize("phase", ["none", *secure_sum.PHASES])
def test_three_of_ten_clients_may_be_lost_in_any_phase(phase: str) -> None:
    rules, values = Rules(clients=10), vectors(10)
    lost = {phase: LOST[phase]} if phase != "none" else {}
    counted = [n for n in values if phase in ("none", *AFTER) or n not in LOST[phase]]
    plain = sum(values[n] for n in counted)
    assert np.abs(total(values, rules, lost) - plain).max() <= len(counted) * rules.step / 2


def test_two_clients_in_a_ring_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of twelve, too small to be secure: what is added up and revealed depends on the neighbours alone."""
    monkeypatch.setattr(Rules, "_thresholds", lambda _: (5, 7))
    rules, values = Rules(clients=12, neighbours=6), vectors(12)
    assert (rules.threshold, rules.holders) == (5, 7)
    plain = sum(vector for n, vector in values.items() if n not in (1, 8))
    assert np.abs(total(values, rules, {"masked": {1, 8}}) - plain).max() <= 10 * rules.step / 2


def test_the_smallest_ring() -> None:
    rules = Rules(clients=50, neighbours=22)
    assert (rules.threshold, rules.holders) == (20, 23)


@slow
def test_two_of_fifty_clients_in_a_ring_may_be_lost() -> None:
    rules, values = Rules(clients=50, neighbours=22), vectors(50)
    plain = sum(vector for n, vector in values.items() if n not in (1, 30))
    assert np.abs(total(values, rules, {"masked": {1, 30}}) - plain).max() <= 48 * rules.step / 2


def test_clients_may_be_lost_in_every_phase_of_one_sum() -> None:
    rules, values = Rules(clients=10), vectors(10)
    lost = {"keys": [0], "shares": [3], "revealed": [9]}
    plain = sum(values[n] for n in (1, 2, 4, 5, 6, 7, 8, 9))
    assert np.abs(total(values, rules, lost) - plain).max() <= 8 * rules.step / 2


@pytest.mark.parametrize("phase", secure_sum.PHASES)
def test_below_the_threshold_there_is_no_sum(phase: str) -> None:
    with pytest.raises(WireError, match=r"threshold|needed"):
        total(vectors(5), Rules(clients=5, threshold=4), {phase: [0, 1]})


@pytest.mark.parametrize("bits", [2, 8, 30, 48])
def test_the_largest_values_of_all_clients_add_up(bits: int) -> None:
    rules = Rules(clients=16, range=4.0, bits=bits)
    words = quantised(np.array([4.0, -4.0, 0.0]), rules)
    total = secure_sum.from_bytes(secure_sum.to_bytes(np.uint64(16) * words, rules), rules)
    assert secure_sum.dequantised(total, rules).tolist() == [64.0, -64.0, 0.0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 4.0001, -5.0])
def test_a_value_that_does_not_fit_is_clipped_and_told_to_the_owner(value: float) -> None:
    rules = Rules(clients=3, threshold=2, range=4.0)
    kept = 0.0 if np.isnan(value) else 4.0 * np.sign(value)
    assert secure_sum.dequantised(quantised(np.array([0.0, value]), rules), rules).tolist() == [0.0, kept]
    problem = secure_sum.problem_of(np.array([0.0, value]), rules)
    assert ("a value is above 4" if np.isfinite(value) else "a value is not finite") in problem
    assert not secure_sum.problem_of(np.array([0.0, 4.0]), rules)


def test_numbers_survive_their_bytes() -> None:
    rules = Rules(clients=3, threshold=2, range=8.0, bits=20)
    values = np.array([-8.0, -1.5, 0.0, 0.25, 8.0])
    words = secure_sum.from_bytes(secure_sum.to_bytes(quantised(values, rules), rules), rules)
    assert secure_sum.dequantised(words, rules).tolist() == values.tolist()
    assert rules.width == 3


def masked_bytes(values: Floats, rules: Rules) -> bytes:
    """What the server receives of client 0, among three clients with fresh keys."""
    begun = [secure_sum.begin(n) for n in range(3)]
    keys = {n: public for n, (_, public) in enumerate(begun)}
    shared = [secure_sum.share(secrets, keys, rules) for secrets, _ in begun]
    sealed = {n: shared[n][1][0] for n in (1, 2)}
    return secure_sum.mask(shared[0][0], sealed, quantised(values, rules), rules, b"")[1]


def test_masked_bytes_are_uniform_and_change_with_the_keys() -> None:
    """Chi-square over the 256 values of a byte: 255 degrees of freedom, the 1e-6 quantile is 376."""
    rules, values = Rules(clients=3, threshold=2), np.zeros(40_000)
    first, second = (np.frombuffer(masked_bytes(values, rules), np.uint8) for _ in range(2))
    for column in [slice(None), *(slice(place, None, rules.width) for place in range(rules.width))]:
        found = first[column]
        expected = len(found) / 256
        statistic = ((np.bincount(found, minlength=256) - expected) ** 2 / expected).sum()
        assert 160 < statistic < 376
    # Two independent bytes are equal once in 256 times: 781 of 200,000, deviation 28.
    assert abs(int((first == second).sum()) - len(first) / 256) < 6 * (len(first) / 256) ** 0.5
    # The plain bytes fail the test by far.
    plain = np.frombuffer(secure_sum.to_bytes(quantised(values, rules), rules), np.uint8)
    assert np.bincount(plain, minlength=256)[0] == len(plain)


def test_a_client_never_reveals_both_secrets_of_another() -> None:
    rules = Rules(clients=3, threshold=2)
    begun = [secure_sum.begin(n) for n in range(3)]
    keys = {n: public for n, (_, public) in enumerate(begun)}
    shared = [secure_sum.share(secrets, keys, rules) for secrets, _ in begun]
    sealed = {n: shared[n][1][0] for n in (1, 2)}
    secrets, _ = secure_sum.mask(shared[0][0], sealed, np.zeros(1, np.uint64), rules, b"")
    revealed = secure_sum.reveal(secrets, {0, 1}, rules)
    assert revealed == {0: secrets.shares[0].seed, 1: secrets.shares[1].seed, 2: secrets.shares[2].key}
    for survivors in ({1, 2}, {0}):  # without itself; fewer than the threshold
        with pytest.raises(WireError, match="threshold is 2"):
            secure_sum.reveal(secrets, survivors, rules)


def added(
    rules: Rules, values: Mapping[int, Floats], contexts: Sequence[bytes]
) -> tuple[MaskedSum, dict[int, dict[int, bytes]]]:
    """The server after three clients have sent their vectors, and what they reveal to it."""
    begun = [secure_sum.begin(n) for n in range(3)]
    server = MaskedSum(rules, {n: k for n, (_, k) in enumerate(begun)}, neighbours(range(3), 0), {}, {})
    secrets = {}
    for n in range(3):
        secrets[n], server.sealed[n] = secure_sum.share(begun[n][0], server.keys_for(n), rules)
        server.commitments[n] = secure_sum.commitment(secrets[n].seed)
    for n in range(3):
        words = quantised(values[n], rules)
        secrets[n], content = secure_sum.mask(secrets[n], server.sealed_for(n), words, rules, contexts[n])
        server.add(n, content, len(words))
    return server, {n: secure_sum.reveal(secrets[n], {0, 1, 2}, rules) for n in range(3)}


def test_vectors_with_different_contexts_do_not_add_up() -> None:
    """The sum of three vectors is noise if one client was shown another model than the others."""
    rules, values = Rules(clients=3), vectors(3)

    def result(contexts: list[bytes]) -> Floats:
        server, revealed = added(rules, values, contexts)
        return server.total(revealed)

    plain = values[0] + values[1] + values[2]
    assert np.abs(result([b"same"] * 3) - plain).max() <= 3 * rules.step / 2
    assert np.median(np.abs(result([b"same", b"same", b"other"]) - plain)) > rules.range / 8


def test_changed_or_exchanged_shares_are_refused() -> None:
    rules = Rules(clients=3, threshold=2)
    begun = [secure_sum.begin(n) for n in range(3)]
    keys = {n: public for n, (_, public) in enumerate(begun)}
    shared = [secure_sum.share(secrets, keys, rules) for secrets, _ in begun]
    words = np.zeros(1, np.uint64)
    damaged = shared[1][1][0][:-8] + b"AAAAAAA="
    for sealed in ({1: damaged}, {1: shared[2][1][0]}, {7: shared[1][1][0]}):
        with pytest.raises(WireError, match=r"were changed|not a neighbour"):
            secure_sum.mask(shared[0][0], sealed, words, rules, b"")
    with pytest.raises(WireError, match="same key"):
        secure_sum.share(begun[0][0], {0: keys[0], 1: keys[1], 2: keys[1]}, rules)


def test_a_wrong_share_is_found() -> None:
    server, revealed = added(Rules(clients=3, threshold=2), vectors(3), [b""] * 3)
    good = revealed[0][1]
    revealed[0][1] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(WireError, match="do not fit together"):
        server.total(revealed)
    with pytest.raises(WireError, match="expected 250"):
        server.add(0, b"\0" * 10, 50)


# A public key on a curve that no library has.
UNKNOWN_CURVE = (
    b"-----BEGIN PUBLIC KEY-----\n"
    + base64.b64encode(bytes.fromhex("3032301006072a8648ce3d020106052b81040006031e0004") + bytes([1]) * 28)
    + b"\n-----END PUBLIC KEY-----\n"
)


@pytest.mark.parametrize("key", [UNKNOWN_CURVE, b"", b"-----BEGIN PUBLIC KEY-----\n", b"\xff" * 300])
def test_a_key_of_no_use_is_one_error(key: bytes) -> None:
    """The server meets the key of one corrupt member when it removes the masks of another, which left."""
    rules, values = Rules(clients=10), vectors(10)
    begun = {n: secure_sum.begin(n) for n in values}
    keys = {n: public for n, (_, public) in begun.items()} | {1: begun[1][1]._replace(masking=key)}
    server = MaskedSum(rules, keys, neighbours(sorted(values), 0), {}, {})
    secrets: dict[int, Secrets] = {}
    for n in values:
        secrets[n], sealed = secure_sum.share(begun[n][0], server.keys_for(n), rules)
        server.sealed[n] = sealed if n != 1 else {0: sealed[0]}  # so that nobody else uses its key
        server.commitments[n] = secure_sum.commitment(secrets[n].seed)
    for n in range(1, 10):
        words = quantised(values[n], rules)
        secrets[n], content = secure_sum.mask(secrets[n], server.sealed_for(n), words, rules, b"")
        server.add(n, content, len(words))
    revealed = {n: secure_sum.reveal(secrets[n], server.survivors, rules) for n in range(2, 10)}
    with pytest.raises(WireError, match="cannot be used"):
        server.total(revealed)
    with pytest.raises(WireError, match="cannot be used"):
        secret_sharing.agreed_key(secret_sharing.new_key(), key)


def test_secrets_survive_their_file() -> None:
    rules = Rules(clients=3, threshold=2)
    begun = [secure_sum.begin(n) for n in range(3)]
    secrets, _ = secure_sum.share(begun[0][0], {n: k for n, (_, k) in enumerate(begun)}, rules)
    assert secure_sum.from_json(json.loads(json.dumps(secure_sum.as_json(secrets)))) == secrets


def test_a_ring_links_both_ways() -> None:
    linked = neighbours([5, 2, 9, 1, 7, 3], 4)
    assert all(len(others) == 4 and client in linked[n] for client, others in linked.items() for n in others)
    assert neighbours([5, 2, 9], 4) == {5: [2, 9], 2: [5, 9], 9: [5, 2]}


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 2},
        {"clients": 4, "threshold": 2},
        {"clients": 4, "threshold": 5},
        {"clients": 4, "bits": 49},
        {"clients": 4, "range": 0.0},
        {"clients": 4, "range": float("inf")},
        {"clients": 4, "neighbours": -1},
        {"clients": 10, "threshold": 6},  # 2 t > n + corrupt: 12 > 10 + 3 is false
        {"clients": 12, "threshold": 3, "neighbours": 4},
        {"clients": 49, "neighbours": 40},
        {"clients": 50, "neighbours": 20},
        {"clients": 50, "threshold": 19, "neighbours": 22},
        {"clients": 50, "threshold": 21, "neighbours": 22},
    ],
)
def test_rules_without_security_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="secure"):
        Rules(**options)  # type: ignore[arg-type]


def test_an_insecure_ring_is_refused_with_the_smallest_secure_one() -> None:
    with pytest.raises(UsageError, match=r"at least 44 neighbours, with secure\.threshold=39, or 0 for all"):
        Rules(clients=100, neighbours=12)
    assert Rules(clients=100, neighbours=44).threshold == 39
    assert Rules(clients=100, neighbours=43).holders == 45  # an even number of neighbours


@pytest.mark.parametrize("clients", [3, 4, 5, 6, 7, 10, 31])
def test_a_third_of_the_clients_cannot_collect_both_secrets(clients: int) -> None:
    corrupt, threshold = math.ceil(clients / 3) - 1, Rules(clients).threshold
    assert 2 * threshold > clients + corrupt >= 2 * (threshold - 1)


def test_two_lost_and_two_corrupt_neighbours_isolate_no_client() -> None:
    """A ring of 12 clients with 4 neighbours and threshold 3, which was allowed, gave client 6's vector away."""
    linked = neighbours(range(12), 4)
    assert {*linked[6]} == {4, 5, 7, 8}
    assert not secure_graph.is_connected(12, 4, 2 / 12, 2 / 12)
    assert secure_graph.is_connected(50, 22)
