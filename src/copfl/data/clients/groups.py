"""The groups of a data set (clients, sources, domains) as clients: how many they are, and their names.

Schemes ask for the groups; whatever shows clients asks for their names.
"""

from collections.abc import Sequence

import numpy as np

from copfl.data.clients.partition import Indices, Partition
from copfl.data.samples import Dataset, Samples
from copfl.errors import DataError


def number_of_groups(dataset: Dataset) -> int:
    """The groups that have train samples, the number of clients of by_group; 0 where the data has none."""
    if dataset.train.group is None or not dataset.groups:
        return 0
    return len(np.unique(group_of(dataset, dataset.train)))


def names_of_clients(dataset: Dataset, partition: Partition) -> list[str]:
    """The name of each client's group, where each client is a group; otherwise their numbers.

    Args:
        dataset: With its groups.
        partition: Who has which samples.
    """
    group = dataset.train.group
    if partition.scheme != "by_group" or group is None or number_of_groups(dataset) != partition.clients:
        return list(map(str, range(partition.clients)))
    return [dataset.groups[group[part[0]]] for part in partition.train]


def client_titles(names: Sequence[str]) -> list[str]:
    """Such as "site 3", or "site 3 (north)" of one that has a name."""
    return [f"site {n}" if name == str(n) else f"site {n} ({name})" for n, name in enumerate(names)]


def group_of(dataset: Dataset, split: Samples) -> Indices:
    """The group of each sample; a DataError if the data set has none.

    Args:
        dataset: With its groups.
        split: Of the data set.
    """
    if split.group is None or not dataset.groups:
        raise DataError(f'"{dataset.name}" has no groups (sources, domains, corruptions); use another scheme')
    return split.group
