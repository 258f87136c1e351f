"""Drives a progress bar by hand."""

import io
import re

from rich.console import Console

from accumtrainer.keras_api import keras
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logs import Logs
from accumtrainer.observers.progress_bar import ProgressBar

BAR = "━"


class Clock:
    """Shows a time that tests move by hand."""

    def __init__(self):
        self.secs = 1000.0

    def __call__(self):
        return self.secs


class StubTrainer:
    """Counts samples, which is all a progress bar asks of a trainer."""

    samples_seen = 0


class Session:
    """Drives a progress bar through a dispatcher, as a trainer would."""

    def __init__(
        self,
        mode,
        *,
        is_terminal=False,
        is_notebook=False,
        width=120,
        **params,
    ):
        self.clock = Clock()
        self.trainer = StubTrainer()
        self.looks = 0
        self.file = io.StringIO()
        console = Console(
            file=self.file,
            width=width,
            force_terminal=is_terminal,
            force_interactive=is_terminal,
            force_jupyter=is_notebook,
            legacy_windows=False,
            color_system=None,
        )
        self.bar = ProgressBar(mode, console=console, clock=self.clock)
        self.dispatcher = Dispatcher(
            None,
            model=keras.Sequential(),
            trainer=self.trainer,
            params={"epochs": 2, "steps": 4, "samples": None, **params},
            progress_bar=self.bar,
        )
        self.call = self.dispatcher.call

    def fetch(self):
        self.looks += 1
        return {"loss": 0.25, "accuracy": 0.875, "learning_rate": 0.1}

    def run_updates(self, *indices, secs=1.0):
        for index in indices:
            self.clock.secs += secs
            self.trainer.samples_seen += 64
            self.call("on_train_batch_end", index, Logs(self.fetch))

    def run_epoch(self, epoch, logs):
        self.call("on_epoch_begin", epoch)
        self.run_updates(0, 1, 2, 3)
        self.call("on_epoch_end", epoch, logs)

    @property
    def output(self):
        return self.file.getvalue()

    @property
    def frames(self):
        """Every line written, live ones too, without control sequences."""
        without_controls = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output)
        return [
            line.rstrip()
            for line in re.split(r"[\r\n]+", without_controls)
            if line.strip()
        ]
