"""FedPer (Arivazhagan et al. 2019): a shared base, and personal layers on top of it."""

from dataclasses import dataclass

from copfl.parts.averaging import PartlyPersonal


@dataclass(frozen=True)
class FedPer(PartlyPersonal):
    """FedAvg of everything but the head; name modules in `personal` for more than one personal layer."""

    personal: tuple[str, ...] = ("head",)  # type: ignore[misc]
