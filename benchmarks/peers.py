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

A further model is a function under `@model`, a further contender one under
`@contender`; nothing else needs to know them.
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
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

MODELS = {}
CONTENDERS = {}


def model(function):
    """Add a model, under its function's name."""
    MODELS[function.__name__] = function
    return function


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


# --- Models: functions that return a module, and a function from a number of
# samples to their x and y ---


@model
def mlp():
    """Make a small perceptron, where nearly everything is overhead."""
    module = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return module, make_images_of(784)


@model
def conv():
    """Make three convolutions on small colour images."""
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        *pool_and_classify(64),
    )
    return module, make_images_of(3, 32, 32)


@model
def resnet():
    """Make a residual network of three stages of two blocks."""
    layers = [*convolve(3, 16, 3), nn.ReLU()]
    channels = 16
    for width, stride in [(16, 1), (32, 2), (64, 2)]:
        layers += [
            ResidualBlock(channels, width, stride),
            ResidualBlock(width, width, 1),
        ]
        channels = width
    module = nn.Sequential(*layers, *pool_and_classify(channels))
    return module, make_images_of(3, 32, 32)


@model
def gpt():
    """Make a language model of four transformer layers."""
    module = LanguageModel(width=128, depth=4, length=64, vocabulary=256)
    return module, make_text_of(length=64, vocabulary=256)


@model
def gpt_medium():
    """Make a language model of six wider transformer layers."""
    module = LanguageModel(width=256, depth=6, length=128, vocabulary=256)
    return module, make_text_of(length=128, vocabulary=256)


@model
def vgg16():
    """Make VGG-16, without dropout."""
    layers = []
    channels = 3
    for width, repeats in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    module = nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(512, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 10),
    )
    return module, make_images_of(3, 32, 32)


@model
def text():
    """Make a bag of words, nearly all of whose weights are an embedding."""
    module = nn.Sequential(
        nn.Embedding(50_000, 64),
        Mean(dim=1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )

    def make_data(samples):
        x = torch.randint(50_000, [samples, 64])
        return x, torch.randint(10, [samples])

    return module, make_data


@model
def tiny():
    """Make a model of ten weights, to see what the loops around it cost."""
    return nn.Linear(1, 10, bias=False), make_images_of(1)


def pool_and_classify(channels):
    """Return the layers from an image to ten logits."""
    return Mean(dim=(2, 3)), nn.Linear(channels, 10)


def convolve(channels, width, size, stride=1):
    """Return the layers of a convolution that is normalized."""
    return (
        nn.Conv2d(
            channels,
            width,
            size,
            stride=stride,
            padding=size // 2,
            bias=False,
        ),
        nn.BatchNorm2d(width),
    )


class Mean(nn.Module):
    """Averages over one or more axes.

    Args:
        dim: int or tuple of int.
    """

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.mean(self.dim)


class ResidualBlock(nn.Module):
    """Adds two convolutions to what comes in.

    Args:
        channels: int, channels that come in.
        width: int, channels that go out.
        stride: int, of the first convolution.
    """

    def __init__(self, channels, width, stride):
        super().__init__()
        self.residual = nn.Sequential(
            *convolve(channels, width, 3, stride),
            nn.ReLU(),
            *convolve(width, width, 3),
        )
        self.shortcut = nn.Identity()
        if (channels, stride) != (width, 1):
            self.shortcut = nn.Sequential(*convolve(channels, width, 1, stride))

    def forward(self, x):
        return functional.relu(self.shortcut(x) + self.residual(x))


class LanguageModel(nn.Module):
    """Predicts the next token of a text.

    Args:
        width: int, of the vectors.
        depth: int, number of blocks.
        length: int, tokens in a text.
        vocabulary: int, number of different tokens.
    """

    def __init__(self, *, width, depth, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads=4) for _ in range(depth))
        )
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, vocabulary)
        )

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.positions))


class TransformerBlock(nn.Module):
    """Adds causal attention, and then a perceptron, to what comes in.

    Args:
        width: int, of the vectors.
        heads: int, which divides `width`.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        return x + self.perceptron(x)

    def attend(self, x):
        """Let every position look at itself and at those before it."""
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.inputs(x).chunk(3, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True
        )
        return self.outputs(y.transpose(1, 2).flatten(2))


def make_images_of(*shape):
    """Make a function that makes images without meaning."""

    def make_data(samples):
        x = torch.randn(samples, *shape)
        return x, torch.randint(10, [samples])

    return make_data


def make_text_of(*, length, vocabulary):
    """Make a function that makes texts without meaning."""

    def make_data(samples):
        tokens = torch.randint(vocabulary, [samples, length + 1])
        return tokens[:, :-1], tokens[:, 1:]

    return make_data


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
