"""Texts of how a program trains by our means, and by plain Keras.

Words in braces are filled in by `fuzz.training`.
"""

TRAINER = '''
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


kept = KeepLosses()


def make_trainer():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    return {trainer}(
        make_model(),
        optimizer=make_optimizer(),
        accumulation=Accumulation({accumulation}),
        callbacks=[kept],
        seed=0,
        {options}
        **compile_arguments(),
    )
'''

TRAINER_OF_COMPILED = (
    TRAINER[: TRAINER.index("    return")]
    + """\
    model = make_model()
    model.compile(make_optimizer(), **compile_arguments())
    return {trainer}(
        model,
        accumulation=Accumulation({accumulation}),
        callbacks=[kept],
        seed=0,
        {options}
    )
"""
)

TRAINED_BY_TRAINER = """

def train():
    trainer = make_trainer()
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
    return add_results(outcome, trainer)
"""

TRAINED_BY_BATCH = """

def train():
    trainer = make_trainer()
    updates = [
        trainer.train_on_batch(*batch, return_dict=True)
        for _, batches in FITS
        for batch in batches
    ]
    outcome = outcome_of(trainer.model, trainer.optimizer, updates, [])
    return add_results(outcome, trainer)
"""

RESULTS_OF_TRAINER = """

def add_results(outcome, trainer):
    x, *rest = TEST
    evaluation = trainer.evaluate([TEST], return_dict={as_dict}, verbose=0)
    prediction = trainer.predict(x, batch_size=64, verbose=0)
    return with_results(outcome, evaluation, prediction)
"""

TRAINED_INSIDE_FIT = """

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
    return add_results(outcome, model)
"""

RESULTS_OF_MODEL = """

def {name}(outcome, model):
    call_as_elsewhere(model)
    return with_results(
        outcome,
        model.test_on_batch(*TEST, return_dict={as_dict}),
        model.predict_on_batch(TEST[0]),
    )
"""

NO_RESULTS = """

def {name}(outcome, trained):
    return outcome
"""

TRAINED_PLAINLY = """

def train_by_keras(noise=0.0):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    model = {prepare}(make_model())
    initial[:] = model.get_weights()
    round_weights(model, noise)
    optimizer = with_dense_gradients(make_optimizer(), noise)
    # Built in a traced step, as `fit` does it on TensorFlow, ScheduleFreeAdamW
    # of Keras 3.15 takes all weights for zeros.
    optimizer.build(model.trainable_variables)
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
    return add_results_of_keras(outcome, model)


initial = []
by_keras = train_by_keras()
ours = train()
found = differences(ours, by_keras, initial, train_by_keras)
"""

HOOK = '''

def means_of(y, outputs):
    """Return pairs: a mean, and the sum of weights that divided it."""
    found = []
    pairs = zip(keras.tree.flatten(y), keras.tree.flatten(outputs))
    for index, (wanted, output) in enumerate(pairs):
        wanted = ops.cast(wanted, output.dtype)
        for power in (2, 4)[: 1 + (index == 0)]:
            weight = 0.1 + ops.abs(wanted) ** power
            total = ops.sum(weight)
            mean = ops.sum(weight * (wanted - output) ** 2) / total
            found.append((mean, total))
    return found


class MyTrainer(Trainer):
    """Computes several losses of every output."""

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        return {
            f"part {index}": WeightedLoss(mean, total)
            for index, (mean, total) in enumerate(means_of(batch.y, outputs))
        }


def compute_by_hook(model):
    """Have Keras compute the same loss."""

    def compute_loss(x=None, y=None, y_pred=None, *args, **kwargs):
        total = sum(mean for mean, _ in means_of(y, y_pred))
        return total + sum(ops.sum(loss) for loss in model.losses)

    model.compute_loss = compute_loss
    return model
'''

BATCHES = '''

class Batches(keras.utils.PyDataset):
    """Yields these batches, in this order."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]
'''

DATASET = '''

def dataset(batches):
    """Yield these batches through `tf.data`."""
    import tensorflow as tf

    signature = keras.tree.map_structure(
        lambda leaf: tf.TensorSpec([None] * leaf.ndim, leaf.dtype), batches[0]
    )
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=signature
    )
'''
