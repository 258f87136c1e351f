"""Train a small GPT, byte by byte, on the sources of Python's own library.

Every machine that runs this has them. Each function is a document, cut where
it is longer than the context; shorter ones are padded, and the padding counts
nothing, so that a micro-batch weighs as much as it has bytes. An update sees
64 documents in 8 micro-batches of 8. At the beginning such an update is made
three times from the same weights: as one big batch, accumulated by bytes, and
as the plain mean over micro-batches that other tools make.

    python examples/language_model.py
    KERAS_BACKEND=jax python examples/language_model.py
    python examples/language_model.py --updates 50 --wandb runs
    python examples/language_model.py --precision mixed_bfloat16
"""

import argparse
import ast
import importlib.util
import os
import textwrap
from pathlib import Path

import keras
import numpy as np
from keras import ops

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import WandbLogger

BATCH_SIZE = 64
ACCUMULATION = Accumulation(micro_batch_size=8)
CONTEXT = 128  # bytes
WIDTH, HEADS = 96, 4
TRAIN, VALIDATE = 16_000, 512  # documents
EDGE = 0  # stands before and after every document


def read_functions(folder):
    """Read the functions and methods of every module in a folder.

    Args:
        folder: `Path` of Python files; those in folders below are left out.

    Returns:
        List with one entry per file, in the order of their names: the
        sources of its functions, a list of bytes.
    """
    files = []
    for file in sorted(folder.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        spans = [
            (node.lineno - 1, node.end_lineno)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
        ]
        texts = (textwrap.dedent("".join(lines[a:b])) for a, b in spans)
        files.append([text.encode() for text in texts])
    return files


def cut_documents(functions):
    """Cut functions into documents, and pad these to the length of CONTEXT.

    Args:
        functions: list of bytes.

    Returns:
        Arrays `[documents, CONTEXT]`: the bytes, int32; the byte that follows
        each, int32; and 1 where it counts, 0 in the padding, float32.
    """
    texts = [bytes([EDGE]) + text + bytes([EDGE]) for text in functions]
    pieces = [
        text[start : start + CONTEXT + 1]
        for text in texts
        for start in range(0, len(text) - 1, CONTEXT)
    ]
    padded = np.full([len(pieces), CONTEXT + 1], EDGE, "int32")
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece)] = list(piece)
    lengths = np.array([len(piece) - 1 for piece in pieces])
    counts = np.arange(CONTEXT) < lengths[:, None]
    return padded[:, :-1], padded[:, 1:], counts.astype("float32")


def load_data(seed):
    """Draw documents, those to validate with from every twentieth file.

    Returns:
        Two triples of arrays, see `cut_documents`.
    """
    files = read_functions(Path(os.__file__).parent)
    valid = cut_documents(sum(files[::20], []))
    del files[::20]
    train = cut_documents(sum(files, []))
    rng = np.random.default_rng(seed)

    def draw(parts, count):
        chosen = rng.permutation(len(parts[0]))[:count]
        return [part[chosen] for part in parts]

    return draw(train, TRAIN), draw(valid, VALIDATE)


def make_model(blocks):
    """Make a decoder with learned positions, normalized before each part."""
    layers = keras.layers
    tokens = keras.Input([None], dtype="int32")
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(256, WIDTH)(tokens)
    x = x + layers.Embedding(CONTEXT, WIDTH)(positions)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        # Padding comes last, where no byte that counts can look.
        x = x + attention(normal, normal, use_causal_mask=True)
        hidden = layers.LayerNormalization()(x)
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        x = x + layers.Dense(WIDTH)(hidden)
    x = layers.LayerNormalization()(x)
    logits = layers.Dense(256, dtype="float32")(x)
    return keras.Model(tokens, logits)


def make_loss():
    """Make the crossentropy per byte that counts, in nats."""
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def make_optimizer(updates):
    """Make AdamW with a cosine of this many updates, a tenth of it warm-up."""
    warmup = max(1, updates // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=1e-4,
        warmup_target=3e-3,
        warmup_steps=warmup,
        decay_steps=max(1, updates - warmup),
    )
    return keras.optimizers.AdamW(
        schedule, weight_decay=0.1, beta_2=0.95, global_clipnorm=1.0
    )


def compare_with_big_batch(model, batch):
    """Make one update of a batch in three ways, from the same weights.

    Args:
        model: model that is not compiled, used up by this.
        batch: triple of arrays, see `cut_documents`.

    Returns:
        How far from Keras's own update with one big batch are the update
        accumulated by bytes, and the one by the mean over micro-batches: two
        floats, relative to the size of Keras's update.
    """
    start = model.get_weights()

    def changes(update):
        model.set_weights(start)
        update()
        pairs = zip(model.get_weights(), start, strict=True)
        return np.concatenate([np.ravel(new - old) for new, old in pairs])

    def accumulate(combine):
        trainer = Trainer(
            model,
            optimizer=keras.optimizers.SGD(1.0),
            loss=make_loss(),
            accumulation=Accumulation(
                micro_batch_size=ACCUMULATION.micro_batch_size, combine=combine
            ),
        )
        trainer.train_on_batch(*batch)

    def take_at_once():
        model.compile(keras.optimizers.SGD(1.0), make_loss())
        model.train_on_batch(*batch)

    at_once = changes(take_at_once)
    by_bytes = changes(lambda: accumulate("exact")) - at_once
    by_means = changes(lambda: accumulate("mean")) - at_once
    size = np.linalg.norm(at_once)
    return np.linalg.norm(by_bytes) / size, np.linalg.norm(by_means) / size


def default_precision():
    """Choose bfloat16 where there is an accelerator, which gains by it."""
    if (
        keras.backend.backend() == "torch"
    ):  # of whose devices Keras keeps no list
        is_faster = keras.ops.zeros(()).device.type != "cpu"
    else:
        devices = map(str.lower, keras.distribution.list_devices())
        is_faster = any(not device.startswith("cpu") for device in devices)
    return "mixed_bfloat16" if is_faster else "float32"


def make_callbacks(folder):
    """Make the logger of a W&B run that stays in a folder, if one is given."""
    if folder is None:
        return []
    if importlib.util.find_spec("wandb") is None:
        print("W&B is not installed, and training goes on without it.")
        print("To install it: pip install 'accumtrainer[wandb]'")
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    return [
        WandbLogger(
            "accumtrainer-language-model",
            mode="offline",
            dir=folder,
            every=Every(5, "updates"),
        )
    ]


def bits_per_byte(trainer, documents):
    """Measure how well documents are predicted, see `cut_documents`."""
    x, y, counts = documents
    nats = trainer.evaluate(x, y, sample_weight=counts, verbose=0)
    return nats / np.log(2)


def write_samples(trainer, count, seed):
    """Let the model go on from `def `, byte by byte.

    Args:
        trainer: `Trainer` of the model.
        count: int, how many documents to write.
        seed: int.

    Returns:
        List of str.
    """
    rng = np.random.default_rng(seed)
    prompt = [EDGE, *b"def "]
    tokens = np.full([count, CONTEXT], EDGE, "int32")
    tokens[:, : len(prompt)] = prompt
    for place in range(len(prompt), CONTEXT):
        logits = trainer.predict(tokens, verbose=0)[:, place - 1]
        # The largest of noisy logits is a draw from their softmax. Dividing
        # them by 0.7 first makes it keep to what is likely.
        noise = rng.gumbel(size=logits.shape)
        tokens[:, place] = np.argmax(logits / 0.7 + noise, axis=1)
    texts = (bytes(row[1:].tolist()).split(b"\0")[0] for row in tokens)
    return [text.decode(errors="replace") for text in texts]


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, help="default: one epoch")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", help="a dtype policy of Keras")
    parser.add_argument("--wandb", metavar="FOLDER", help="log there, offline")
    return parser.parse_args()


def main():
    """Compare the updates, train, and print what has been learnt."""
    arguments = read_arguments()
    keras.utils.set_random_seed(arguments.seed)
    train, valid = load_data(arguments.seed)
    x, y, counts = train
    by_bytes, by_means = compare_with_big_batch(
        make_model(arguments.blocks), [part[:BATCH_SIZE] for part in train]
    )
    updates = arguments.updates or ACCUMULATION.updates(
        samples=len(x), batch_size=BATCH_SIZE
    )
    precision = arguments.precision or default_precision()
    keras.config.set_dtype_policy(precision)
    trainer = Trainer(
        make_model(arguments.blocks),
        optimizer=make_optimizer(updates),
        loss=make_loss(),
        accumulation=ACCUMULATION,
        callbacks=make_callbacks(arguments.wandb),
        seed=arguments.seed,
    )
    print(
        f"{len(x):,} documents of {counts.sum():,.0f} bytes to train on, "
        f"{len(valid[0])} to validate; {precision}; Keras on "
        f"{keras.backend.backend()}"
    )
    before = bits_per_byte(trainer, valid)
    trainer.fit(
        x, y, sample_weight=counts, batch_size=BATCH_SIZE, max_updates=updates
    )
    after = bits_per_byte(trainer, valid)
    if arguments.samples:
        texts = write_samples(trainer, arguments.samples, arguments.seed)
        print("", *texts, sep="\n")
    print()
    print(f"bits per byte   {before:.2f} before training")
    print(f"                {after:.2f} after {updates} updates")
    print(f"8 x 8 vs 64     differ by {by_bytes:.1e} where bytes are weighed,")
    print(f"                by {by_means:.1e} with the mean of the means")


if __name__ == "__main__":
    main()
