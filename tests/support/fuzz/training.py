"""How a program trains, on which data, and what both make of it."""

import dataclasses

TRAINED_BY_TRAINER = '''
class KeepLosses(accumtrainer.Callback):
    """Keeps the losses of every applied update."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def on_apply(self, update, logs=None):
        if logs["applied"]:
            self.kept.append(
                {n: v for n, v in logs.items() if n.endswith("loss")}
            )


def train():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    kept = KeepLosses()
    trainer = Trainer(
        make_model(),
        optimizer=make_optimizer(),
        accumulation=Accumulation({accumulation}),
        callbacks=[kept],
        seed=0,
        {options}
        **compile_arguments(),
    )
    histories = []
    for epochs, batches in FITS:
        history = trainer.fit(
            {data}, epochs=epochs, verbose=0{fit_options}
        )
        histories.append(history.history)
        {between}
    outcome = outcome_of(
        trainer.model, trainer.optimizer, kept.kept, histories
    )
    x, *rest = TEST
    evaluation = trainer.evaluate([TEST], return_dict={as_dict}, verbose=0)
    return add_results(
        outcome, evaluation, trainer.predict(x, batch_size=64, verbose=0)
    )
'''

TRAINED_INSIDE_FIT = '''
class Batches(keras.utils.PyDataset):
    """Yields these batches, in this order."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def train():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    model = make_model()
    model.compile(make_optimizer(), {options} **compile_arguments())
    accumulation = GradientAccumulation({accumulation})
    histories = []
    for epochs, batches in FITS:
        history = model.fit(
            {data},
            epochs=epochs,
            verbose=0,
            callbacks=[accumulation]{fit_options},
        )
        histories.append(history.history)
        {between}
    outcome = outcome_of(model, model.optimizer, [], histories)
    return add_results(
        outcome,
        model.test_on_batch(*TEST, return_dict={as_dict}),
        model.predict_on_batch(TEST[0]),
    )
'''

TRAINED_BY_BATCH = """
def train():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    trainer = Trainer(
        make_model(),
        optimizer=make_optimizer(),
        accumulation=Accumulation({accumulation}),
        seed=0,
        {options}
        **compile_arguments(),
    )
    updates = [
        trainer.train_on_batch(*batch, return_dict=True)
        for _, batches in FITS
        for batch in batches
    ]
    outcome = outcome_of(trainer.model, trainer.optimizer, updates, [])
    x, *rest = TEST
    evaluation = trainer.evaluate([TEST], return_dict={as_dict}, verbose=0)
    return add_results(
        outcome, evaluation, trainer.predict(x, batch_size=64, verbose=0)
    )
"""

TRAINED_PLAINLY = """
def train_by_keras(noise=0.0):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    model = make_model()
    initial[:] = model.get_weights()
    optimizer = with_dense_gradients(make_optimizer(), noise)
    model.compile(optimizer, {plain_options} **compile_arguments())
    outcome = train_plainly(
        model,
        [
            [
                [join(window) for window in windows]
                for windows in windows_of_epochs(batches, epochs, STEPS, TAIL)
            ]
            for epochs, batches in FITS
        ],
        class_weight=CLASS_WEIGHT,
        between={between_text},
        is_fit={is_fit},
    )
    return add_results(
        outcome,
        model.test_on_batch(*TEST, return_dict={as_dict}),
        model.predict_on_batch(TEST[0]),
    )


initial = []
by_keras = train_by_keras()
ours = train()
found = differences(ours, by_keras, initial, train_by_keras)
"""

LAST = """
if __name__ == "__main__":
    print("\\n".join(found) or "They agree.")
"""


@dataclasses.dataclass(frozen=True)
class Training:
    """The texts of how a program trains, and on which data."""

    data: str
    template: str
    options: str
    fields: dict
    features: tuple

    @property
    def text(self):
        """Both ways to train, and their comparison."""
        both = self.template + TRAINED_PLAINLY
        return filled(both, self.options, self.fields)


def draw_training(draw, model, backend, which, *, may_weigh_classes, may_spoil):
    """Draw how to accumulate, and the batches of every fit."""
    whole = model.only_one_micro_batch
    drawn = DrawnData(draw, model, backend, which)
    tail, steps = "flush", "lambda updates: 1"
    k = 1
    if which in ("slices", "batch"):
        size = draw.choice([1, 2, 3])
        accumulation = f"micro_batch_size={size}"
    elif which == "sizes":
        counts = [draw.randint(1, 4) for _ in range(8)]
        steps = f"lambda updates: {counts}[updates % 8]"
        accumulation = f"steps={steps}"
    else:
        k = 1 if whole else draw.choice([1, 2, 2, 3, 3, 4, 5])
        steps = f"lambda updates: {k}"
        accumulation = f"steps={k}"
        if which == "steps":
            tails = ["flush", "carry"] + ["drop"] * (drawn.fewest >= k)
            tail = draw.choice(tails)
            accumulation += f", tail='{tail}'"
    if tail != "carry":
        # Keras's `fit` looks at the first batches for what all are like.
        drawn.draw_lengths(99 if which in ("sizes", "fit") else k)
        if model.has_extra:
            # Within a fit every batch must have the same parts.
            drawn.draw_extras(1 if which == "batch" else 99)
    if may_spoil and which not in ("sizes", "batch") and draw.random() < 0.25:
        drawn.spoil(k)
    class_weight = None
    if may_weigh_classes and which != "batch" and draw.random() < 0.5:
        class_weight = {0: 0.5, 1: 2.0, 2: 1.5}
    data = (
        f"\n\nrng = np.random.default_rng(SEED)\n"
        f"FITS = [  # how many epochs, of which batches\n{drawn.rows}]\n"
        f"TEST = make_batch(rng, 5, {drawn.test_length})\n"
        f"STEPS, TAIL = {steps}, '{tail}'\n"
        f"CLASS_WEIGHT = {class_weight}\n"
    )
    return finish_training(
        draw, which, accumulation, data, backend, drawn, class_weight
    )


class DrawnData:
    """The batches of every fit.

    Args:
        draw: `random.Random`.
        model: `Model`.
        backend: name of the backend.
        which: how batches make updates.
    """

    def __init__(self, draw, model, backend, which):
        self.draw = draw
        # On JAX every size is compiled.
        sizes = [1, 2, 3, 4] if backend == "tensorflow" else [2, 3]
        if which in ("slices", "batch"):
            sizes = [3, 4, 5, 7] if backend == "tensorflow" else [4, 5]
        self.varies = model.varies_in_length
        count = draw.choice([1, 1, 1, 2, 2, 3]) if which != "sizes" else 1
        self.fits = [self._fit(sizes, which) for _ in range(count)]
        self.lengths = [[4] * len(sizes) for _, sizes, _ in self.fits]
        self.extras = [[False] * len(sizes) for _, sizes, _ in self.fits]
        self.spoilt = [set() for _ in self.fits]
        self.test_length = draw.choice([4, 2, 3]) if self.varies else 4

    def _fit(self, sizes, which):
        draw = self.draw
        is_even = draw.random() < 0.5
        size = draw.choice(sizes)
        most = 3 if which in ("slices", "batch") else 6
        count = draw.randint(1, most)
        chosen = [size if is_even else draw.choice(sizes) for _ in range(count)]
        epochs = 1 if which == "batch" else draw.choice([1, 1, 2])
        return epochs, chosen, is_even

    @property
    def fewest(self):
        """How many batches the shortest fit has."""
        return min(len(sizes) for _, sizes, _ in self.fits)

    @property
    def are_even(self):
        """Whether a fit's batches could be cut out of arrays."""
        return all(
            is_even and len(set(lengths)) == 1 and len(set(extras)) == 1
            for (_, _, is_even), lengths, extras in zip(
                self.fits, self.lengths, self.extras, strict=True
            )
        )

    def draw_lengths(self, steps):
        """Draw a length for every update of so many batches."""
        if not self.varies or self.draw.random() < 0.4:
            return
        for lengths in self.lengths:
            for index in range(len(lengths)):
                if index % steps == 0:
                    length = self.draw.choice([4, 2, 3])
                lengths[index] = length

    def draw_extras(self, steps):
        """Draw for every update of so many batches whether it has more."""
        for extras in self.extras:
            for index in range(len(extras)):
                if index % steps == 0:
                    has_more = self.draw.random() < 0.5
                extras[index] = has_more

    def spoil(self, steps):
        """Have an update of a fit be not finite, where it has others."""
        for spoilt, lengths in zip(self.spoilt, self.lengths, strict=True):
            if len(lengths) >= 2 * steps:
                spoilt.add(self.draw.randrange(len(lengths) - steps))

    @property
    def rows(self):
        """The text of all fits."""
        rows = []
        for (epochs, sizes, _), lengths, extras, spoilt in zip(
            self.fits, self.lengths, self.extras, self.spoilt, strict=True
        ):
            batches = [
                f"make_batch(rng, {size}, {length}{', True' * extra})"
                for size, length, extra in zip(
                    sizes, lengths, extras, strict=True
                )
            ]
            for index in spoilt:
                batches[index] = f"spoil({batches[index]})"
            rows.append(f"    ({epochs}, [{', '.join(batches)}]),\n")
        return "".join(rows)


def finish_training(
    draw, which, accumulation, data, backend, drawn, class_weight
):
    """Choose how the two are run: as fast as a few tiny windows can be."""
    plain = "jit_compile=True,"
    how = ["jit_compile=True,"]
    if backend == "tensorflow":
        plain = "run_eagerly=True, jit_compile=False,"
        how = ["jit_compile=False,"] * 4 + ["run_eagerly=True,"] * 4
        how += [""] * (which != "fit")
    options = draw.choice(how)
    template = {
        "fit": TRAINED_INSIDE_FIT,
        "batch": TRAINED_BY_BATCH,
    }.get(which, TRAINED_BY_TRAINER)
    text = "batches" if which != "fit" else "Batches(batches)"
    fit_options = ", shuffle=False" if which == "fit" else ""
    features = [which, options.strip(",") or "XLA as it chooses"]
    if which in ("fit", "steps", "slices") and drawn.are_even:
        if draw.random() < 0.5:
            text, fit_options = "**arrays(batches)", ", shuffle=False"
            features.append("arrays")
    if class_weight:
        fit_options += ", class_weight=CLASS_WEIGHT"
        features.append("class weights")
    if any(drawn.spoilt):
        features.append("skipped windows")
    # Keras on JAX reads the weights of losses once, when it compiles.
    changes = backend == "tensorflow" and which != "batch"
    fields = {
        "accumulation": accumulation,
        "data": text,
        "fit_options": fit_options,
        "between": "change_weights()" if changes else "",
        "between_text": "change_weights" if changes else "lambda: None",
        "as_dict": str(draw.random() < 0.6),
        "plain_options": plain,
        "is_fit": str(which != "batch"),
    }
    return Training(data, template, options, fields, tuple(features))


def filled(text, options, fields):
    """Fill the fields of a template in."""
    text = text.replace(
        "        {options}\n", f"        {options}\n" if options else ""
    ).replace("{options}", options)
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", value)
    return text
