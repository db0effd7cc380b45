"""`copfl choose`: a race within a budget, its ranking and its verdict."""
