"""Draw docs/run.png: the training of examples/digits.py, with an image of NaN.

python docs/run.py
"""

import sys
from pathlib import Path

import keras
import numpy as np

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "examples"))

import digits  # noqa: E402, it is found by the line above

from accumtrainer import Every, Trainer  # noqa: E402
from accumtrainer.callbacks import TrainingPlot  # noqa: E402


def main():
    """Train for eight epochs, with an image that is not finite."""
    keras.utils.set_random_seed(0)
    (x, y), validation, _ = digits.load_data(0)
    x[500] = np.nan
    updates = digits.ACCUMULATION.updates(
        samples=len(x), batch_size=digits.BATCH_SIZE, epochs=8
    )
    trainer = Trainer(
        digits.make_model(),
        optimizer=keras.optimizers.AdamW(digits.make_schedule(updates)),
        loss=digits.make_loss(),
        metrics=["accuracy"],
        accumulation=digits.ACCUMULATION,
        seed=0,
        callbacks=[TrainingPlot(DOCS / "run.png", every=Every(1, "updates"))],
    )
    trainer.fit(
        x,
        y,
        batch_size=digits.BATCH_SIZE,
        epochs=8,
        validation_data=validation,
        verbose=2,
    )


if __name__ == "__main__":
    main()
