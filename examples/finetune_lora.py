"""Fine-tune a language model of KerasHub with LoRA, on raw text.

A small GPT-2 first learns plain sentences with all of its weights. LoRA then
freezes them and trains two narrow matrices beside some of them, on the same
sentences told by a gossip. The task's own preprocessor makes tokens of raw
text, and weights of what is no padding: an update's loss counts every letter
alike, however the texts are cut into micro-batches. All text is made up here.

    python examples/finetune_lora.py
    KERAS_BACKEND=jax python examples/finetune_lora.py

Needs `keras-hub`, an extra of this package.
"""

import argparse
import string

import keras
import keras_hub
import numpy as np

from accumtrainer import Accumulation, Trainer

BATCH_SIZE = 64
MICRO_BATCH_SIZE = 16
LONGEST = 56
ANIMALS = "cat dog fox owl hen horse".split()
VERBS = "sees hears likes fears follows".split()


def write_sentences(count, seed):
    """Write plain sentences, and how a gossip would tell each.

    Returns:
        Two lists of str.
    """
    rng = np.random.default_rng(seed)
    plain, gossip = [], []
    for _ in range(count):
        one, other = rng.choice(ANIMALS, 2, replace=False)
        verb = rng.choice(VERBS)
        plain.append(f"the {one} {verb} the {other}.")
        gossip.append(f"oh, the {one} {verb} the {other}, they say!")
    return plain, gossip


def make_task():
    """Make a small GPT-2 that reads letter by letter."""
    end = "<|endoftext|>"
    # What the tokenizer of GPT-2 makes of a space, and one pair of letters it
    # may join, as it wants at least one.
    letters = [end, *string.ascii_lowercase, *".,!", "\u0120", "th"]
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer(
        vocabulary={letter: i for i, letter in enumerate(letters)},
        merges=["t h"],
    )
    return keras_hub.models.GPT2CausalLM(
        keras_hub.models.GPT2Backbone(
            vocabulary_size=len(letters),
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            intermediate_dim=128,
            max_sequence_length=LONGEST,
            dropout=0.0,
        ),
        preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(
            tokenizer, sequence_length=LONGEST
        ),
    )


def make_trainer(task, peak, texts, epochs):
    """Make a Trainer with a schedule that counts updates."""
    accumulation = Accumulation(micro_batch_size=MICRO_BATCH_SIZE)
    updates = accumulation.updates(
        samples=len(texts), batch_size=BATCH_SIZE, epochs=epochs
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, updates, warmup_target=peak, warmup_steps=updates // 10
    )
    return Trainer(
        task,
        optimizer=keras.optimizers.AdamW(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        accumulation=accumulation,
        seed=0,
    )


def fit(trainer, texts, epochs):
    """Train on raw text."""
    trainer.fit(texts, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)


def guessed(trainer, texts):
    """Say which share of the letters of texts is guessed from those before."""
    return trainer.evaluate(texts, verbose=0, return_dict=True)["accuracy"]


def count_trainable(task):
    """Count the numbers that training moves."""
    return sum(int(np.prod(v.shape)) for v in task.trainable_variables)


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train all weights on sentences, then those of LoRA on gossip."""
    arguments = read_arguments()
    keras.utils.set_random_seed(arguments.seed)
    plain, gossip = write_sentences(512, seed=arguments.seed)
    _, unseen = write_sentences(64, seed=arguments.seed + 1)

    task = make_task()
    print(f"weights           {count_trainable(task):,} trained at first")
    trainer = make_trainer(task, 5e-3, plain, arguments.epochs)
    fit(trainer, plain, arguments.epochs)
    before = guessed(trainer, unseen)

    task.backbone.enable_lora(arguments.rank)
    print(f"                  {count_trainable(task):,} with LoRA")
    trainer = make_trainer(task, 2e-2, gossip, arguments.epochs)
    equivalence = trainer.check_equivalence((gossip[:BATCH_SIZE],))
    fit(trainer, gossip, arguments.epochs)

    print(f"letters guessed   {before:.1%} of gossip before fine-tuning")
    print(f"                  {guessed(trainer, unseen):.1%} after it")
    print(
        f"updates           {trainer.progress.updates}, of {BATCH_SIZE} texts"
    )
    print(f"one of them       {str(equivalence).splitlines()[0]}")


if __name__ == "__main__":
    main()
