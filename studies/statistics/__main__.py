"""Prints the tables of docs/statistics.md: `python -m studies.statistics`."""

from studies.statistics.rates import CLIENTS, MODELS, OWN, SEEDS, alternative, coverage, false_positives

ROWS = (
    (7, 4, 3),
    (7, 10, 3),
    (7, 30, 10),
    (35, 4, 3),
    (35, 10, 5),
)  # of a comparison, with clients and seeds
FEW_AND_MANY = ((2, 2), (3, 3), (10, 3), (30, 2))  # clients and seeds


def main() -> None:
    """Prints the tables as Markdown."""
    models = (*MODELS, OWN)
    print(
        "| number of clients | number of seeds | "
        + " | ".join(models)
        + " |\n|"
        + " ---: |" * (2 + len(models))
    )
    for clients in CLIENTS:
        for seeds in SEEDS:
            rates = [100 * coverage(clients, seeds, model) for model in models]
            print(
                f"| {clients} | {seeds} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |", flush=True
            )
    kinds = "same clients, row by row | same, corrected | own clients, row by row | own, corrected"
    print(f"\n| rows | clients | seeds | {kinds} |\n|" + " ---: |" * 7)
    for sizes in ROWS:
        rates = [rate for same in (True, False) for rate in false_positives(*sizes, same_clients=same)]
        print(
            "| " + " | ".join([*map(str, sizes), *(f"{100 * rate:.1f}" for rate in rates)]) + " |", flush=True
        )
    print("\n| clients | seeds | varies | copfl's | generalised | width |\n|" + " ---: |" * 6)
    for clients, seeds in FEW_AND_MANY:
        for model in ("rest", "clients, rest", "all"):
            found = alternative(clients, seeds, model)
            rates = [100 * rate for rate in (found.covered_by_copfls, found.covered, found.width)]
            print(f"| {clients} | {seeds} | {model} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[2]:.0f} |")


if __name__ == "__main__":
    main()
