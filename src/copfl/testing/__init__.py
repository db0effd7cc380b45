"""`check_algorithm`: the laws that every algorithm must obey, those of the registry and your own.

| law | the kind of bug it finds |
| --- | --- |
| frozen dataclass | numbers that repr hides or replace() loses |
| no side effects | changed arguments; randomness from outside the plan |
| the same run twice | random numbers that are no function of the seed, the round and the client |
| engines agree | hidden state; operations that vmap cannot map; one client, some clients, unequal sizes |
| fixed shapes | records that grow |
| messages by id | rows matched by position instead of by id |
| any order of uploads | a server that depends on the order of arrival |
| personal entries stay | an upload of personal entries or local statistics |
| wire round trip | fields that bytes cannot represent; None in round one |
| round without uploads | 0 / 0 |
| one client | 1 / (1 - alpha) |
| numbers as targets | losses that assume classes; one that needs them refuses the task with a UsageError |
| times until an event | losses that assume one target per output, and padding that is at risk |
| samples of two arrays | indexing `data.x` instead of each of its arrays |
"""

from copfl.testing.federations import SIZES, LoRALinear, add_lora, other_federation, small_federation
from copfl.testing.laws import LAWS, TOLERANCE, algorithm_checks, check_algorithm

__all__ = [
    "LAWS",
    "SIZES",
    "TOLERANCE",
    "LoRALinear",
    "add_lora",
    "algorithm_checks",
    "check_algorithm",
    "other_federation",
    "small_federation",
]
