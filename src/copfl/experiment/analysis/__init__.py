"""What a run shows: gains, benefit, evidence, convergence, hints."""
