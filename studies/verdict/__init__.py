"""Is the verdict true? Half of each site's rows are a study, and the other half the truth."""
