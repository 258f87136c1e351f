"""Train like PyTorch users do, and answer when told how many updates to make.

This runs in an environment of its own, with torch, lightning and accelerate,
and knows nothing of Keras. All contenders take random data that lie in the
host's memory, as many as the most updates asked for at once need. They shuffle
them anew on every pass, which may span requests, and update with the mean
gradient of some micro-batches.

    python benchmarks/peers.py loop mlp --micro-batch-size 32 \
        --micro-batches 8 --most-updates 100

When all is ready, it prints a line `{"parameters": ..., "versions": ...}`. For
every line `{"updates": n}` of its input it makes n updates, waits until they
are done, and prints `{"loss": ...}`, their mean loss. Nothing else comes out;
the end of the input ends it.

A further model is a function under `@model` in `peer_models.py`, a further
contender one under `@contender`; nothing else needs to know them.
"""

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata

import torch
from peer_models import MODELS
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CONTENDERS = {}


def contender(function):
    """Add a contender, under its function's name."""
    CONTENDERS[function.__name__] = function
    return function


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a contender has to train.

    Args:
        module: `nn.Module` that returns logits; the contender trains it.
        dataset: `TensorDataset` of x and y, a whole number of windows.
        micro_batch_size: samples in a micro-batch.
        micro_batches: micro-batches in an update.
        is_bfloat16: whether to compute in bfloat16 where autocast does.
    """

    module: nn.Module
    dataset: TensorDataset
    micro_batch_size: int
    micro_batches: int
    is_bfloat16: bool


# --- Contenders: functions of a task and a client, which never return ---


@contender
def loop(task, client):
    """Write the loop by hand."""
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    precision = contextlib.nullcontext()
    if task.is_bfloat16:
        precision = torch.autocast(device.type, dtype=torch.bfloat16)
    module = task.module.to(device)
    optimizer = make_optimizer(module)
    batches = shuffle_for_ever(task, device)
    client.greet(module)
    while True:
        for _ in range(client.receive()):
            for x, y in itertools.islice(batches, task.micro_batches):
                with precision:
                    loss = loss_fn(module(x), y)
                (loss / task.micro_batches).backward()
                client.note(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        client.answer()


@contender
def accelerate(task, client):
    """Let Accelerate say when to update."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        gradient_accumulation_steps=task.micro_batches,
        mixed_precision="bf16" if task.is_bfloat16 else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    module, optimizer, loader = accelerator.prepare(
        task.module, make_optimizer(task.module), make_loader(task)
    )
    batches = repeat_for_ever(loader)
    client.greet(module)
    while True:
        micro_batches = client.receive() * task.micro_batches
        for x, y in itertools.islice(batches, micro_batches):
            with accelerator.accumulate(module):
                loss = loss_fn(module(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            client.note(loss)
        client.answer()


@contender
def lightning(task, client):
    """Let Lightning train, in one call of `fit` that never ends by itself."""
    import lightning.pytorch

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(lightning.pytorch.LightningModule):
        """Tells Lightning what to train."""

        def __init__(self):
            super().__init__()
            self.module = task.module

        def configure_optimizers(self):
            return make_optimizer(self.module)

        def training_step(self, batch):
            x, y = batch
            loss = loss_fn(self.module(x), y)
            client.note(loss)
            return loss

    class Conversation(lightning.pytorch.Callback):
        """Holds training up between a request's end and the next one."""

        def on_train_start(self, trainer, pl_module):
            client.greet(pl_module)
            self.receive()

        def on_train_batch_end(self, *_):
            self.micro_batches_left -= 1
            if self.micro_batches_left == 0:
                client.answer()
                self.receive()

        def receive(self):
            """Wait until there is something to do."""
            self.micro_batches_left = client.receive() * task.micro_batches

    trainer = lightning.pytorch.Trainer(
        accumulate_grad_batches=task.micro_batches,
        # Neither logs, nor checkpoints, nor a progress bar, nor a summary.
        barebones=True,
        callbacks=[Conversation()],
        devices=1,
        max_epochs=-1,
        precision="bf16-mixed" if task.is_bfloat16 else "32-true",
    )
    trainer.fit(Module(), make_loader(task))


def make_optimizer(module):
    """Make the optimizer of every contender, with the numbers of Keras."""
    return torch.optim.Adam(module.parameters(), lr=1e-3, eps=1e-7)


def loss_fn(logits, targets):
    """Return the mean cross entropy, whatever is classified."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def shuffle_for_ever(task, device):
    """Yield micro-batches on a device, in a new order on every pass."""

    def move(rows):
        if device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(device, non_blocking=True)

    x, y = task.dataset.tensors
    while True:
        for rows in torch.randperm(len(x)).split(task.micro_batch_size):
            yield move(x[rows]), move(y[rows])


def make_loader(task):
    """Make a loader that shuffles, and indexes once for a micro-batch."""
    return DataLoader(
        IndexedAtOnce(*task.dataset.tensors),
        batch_size=task.micro_batch_size,
        shuffle=True,
        collate_fn=lambda micro_batch: micro_batch,
        pin_memory=torch.cuda.is_available(),
    )


class IndexedAtOnce(TensorDataset):
    """Spares a loader taking samples one by one, and stacking them."""

    def __getitems__(self, rows):
        return self[rows]


def repeat_for_ever(loader):
    """Yield what a loader yields, pass after pass."""
    while True:
        yield from loader


# --- Talking ---


class EndOfRequests(Exception):  # noqa: N818, it is no error
    """Says that nobody will ask for more updates."""


class Client:
    """Reads requests, collects losses, and answers.

    Args:
        requests: text file of JSON lines.
        answers: text file to write JSON lines to.
    """

    def __init__(self, requests, answers):
        self.requests = requests
        self.answers = answers
        self.losses = []

    def greet(self, module):
        """Say that all is ready, and what will be trained."""
        counts = [p.numel() for p in module.parameters() if p.requires_grad]
        packages = ("torch", "lightning", "accelerate")
        versions = {name: metadata.version(name) for name in packages}
        self._say(parameters=sum(counts), versions=versions)

    def receive(self):
        """Wait for a request, and return how many updates to make."""
        line = self.requests.readline()
        if not line:
            # Every loop ends here, also the one that Lightning owns.
            raise EndOfRequests
        updates = json.loads(line)["updates"]
        if updates < 1:
            raise ValueError(
                "updates must be a whole number of at least 1. "
                f"Received: updates={updates}."
            )
        return updates

    def note(self, loss):
        """Keep the loss of a micro-batch, which stays on its device."""
        self.losses.append(loss.detach())

    def answer(self):
        """Wait for the device, and send the mean of the losses."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._say(loss=torch.stack(self.losses).mean().item())
        self.losses.clear()

    def _say(self, **fields):
        print(json.dumps(fields), file=self.answers, flush=True)


def take_stdout():
    """Return the standard output, and let others write to that of errors."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("model", choices=MODELS)
    for name in ("micro-batch-size", "micro-batches", "most-updates"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--bfloat16", action="store_true")
    return parser.parse_args()


def main():
    """Train for as long as somebody asks."""
    arguments = read_arguments()
    client = Client(sys.stdin, take_stdout())
    torch.manual_seed(0)
    module, make_data = MODELS[arguments.model]()
    samples_per_update = arguments.micro_batch_size * arguments.micro_batches
    data = make_data(arguments.most_updates * samples_per_update)
    task = Task(
        module=module,
        dataset=TensorDataset(*data),
        micro_batch_size=arguments.micro_batch_size,
        micro_batches=arguments.micro_batches,
        is_bfloat16=arguments.bfloat16,
    )
    with contextlib.suppress(EndOfRequests):
        CONTENDERS[arguments.contender](task, client)


if __name__ == "__main__":
    main()
