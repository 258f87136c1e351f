"""Ready-made callbacks, installed as `accumtrainer.callbacks`."""
