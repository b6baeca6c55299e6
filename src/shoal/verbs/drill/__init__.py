"""shoal doctor --drill: harm done to a small run here, and what became of the run."""
