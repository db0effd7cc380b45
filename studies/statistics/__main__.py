"""Prints the tables of docs/statistics.md: `python -m studies.statistics`."""

from studies.statistics.rates import CLIENTS, MODELS, OWN, SEEDS, coverage, false_positives

ROWS = (
    (7, 4, 3),
    (7, 10, 3),
    (7, 30, 10),
    (35, 4, 3),
    (35, 10, 5),
)  # of a comparison, with clients and seeds


def main() -> None:
    """Prints both tables as Markdown."""
    models = (*MODELS, OWN)
    print("| clients | seeds | " + " | ".join(models) + " |\n|" + " ---: |" * (2 + len(models)))
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


if __name__ == "__main__":
    main()
