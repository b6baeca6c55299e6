"""shoal train: where the processes come from (`start`), and what each of them does (`loop`)."""

from shoal.verbs.train.start import Trained, command, train

__all__ = ["Trained", "command", "train"]
