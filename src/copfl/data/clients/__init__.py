"""Who has which samples: partitions, their schemes, and the federation that they make."""
