"""Error classes, and the explanations too long to stand where they arise."""

UNKNOWN_KERAS = (
    "ACCUMTRAINER_KERAS must be 'keras'. Received: "
    "ACCUMTRAINER_KERAS={name!r}. Unset it to stand on Keras 3."
)

LOSS_WITHOUT_REDUCTION = (
    "loss must have a reduction. Received: loss {loss!r} with reduction=None. "
    "Use reduction='sum' or 'sum_over_batch_size'."
)

BARE_LOSS = (
    "compute_loss must say what its loss was averaged over, because the "
    "micro-batches of a window may count differently. Received: a scalar "
    "loss of unknown denominator. Return WeightedLoss(mean, denominator), "
    "use a keras loss that returns one value per example, say "
    "Trainer(denominator='samples') or denominator=fn(batch) if you know what "
    "it was averaged over, or choose Accumulation(combine='mean')."
)

NOT_A_WEIGHTED_LOSS = (
    "compute_loss must return a WeightedLoss or a dict of them by name. "
    "Received: {result!r}. Return WeightedLoss(mean, denominator), where "
    "denominator is what the mean was divided by."
)

LOG_OUTSIDE_HOOK = (
    "self.log must be called from a hook, while the step is traced. "
    "Received: self.log({name!r}) outside one. In host code, put numbers into "
    "`logs` from a callback."
)

LOGGED_TWICE = (
    "self.log must be called once per hook for a name, always with the same "
    "reduce. Received: {name!r} again. Give the second value its own name."
)

WRONG_STRUCTURE = "{hook} must return {rule}. Received: {received}."

UNSUPPORTED_BACKEND = (
    "Keras must run on a supported backend: tensorflow or jax. Received: "
    "KERAS_BACKEND={backend!r}. Set KERAS_BACKEND=tensorflow or jax before "
    "Keras is imported, and install accumtrainer[tensorflow] or "
    "accumtrainer[jax]."
)

NOT_AN_ARRAY = (
    "{name} must hold dense arrays with one row per sample, or nests of them. "
    "Received: {received}. Turn lists of numbers into an array with "
    "np.asarray, and pad or densify ragged and sparse data."
)

EVERYTHING_DROPPED = (
    "tail='drop' must leave something to train on. Received: {batches} loader "
    "batches in epoch {epoch}, fewer than the {steps} of one update. Use "
    "tail='flush' or 'carry', fewer steps, or a smaller batch_size."
)

NO_BATCHES = (
    "A data source must yield at least one batch in every epoch. Received: "
    "none in epoch {epoch}. Give steps_per_epoch no larger than what the "
    "source holds per epoch, or a source that can be iterated again: a list, "
    "a dataset, or an object whose __iter__ starts afresh."
)

UNKNOWN_HOOK = (
    "A subclass of Trainer must define only methods that somebody calls. "
    "Received: {cls}.{name}, which is no hook. {remedy} The hooks are "
    "{hooks}."
)

MODEL_WITH_OWN_STEP = (
    "model must not override {step}, because a Trainer would never call it. "
    "Received: {model}.{step}. Move what it does into {remedy}."
)

NOTHING_TO_TRAIN = (
    "model must have trainable weights. Received: model {model!r} with none. "
    "Set layer.trainable = True before making the Trainer."
)

HAND_MADE_LOSS_SCALE_OPTIMIZER = (
    "optimizer must not scale the loss itself, or it would be scaled twice. "
    "Received: a LossScaleOptimizer. Give its inner optimizer, and its "
    "settings as Trainer(loss_scale=LossScale(initial=..., "
    "growth_interval=...))."
)

OPTIMIZER_ACCUMULATES = (
    "optimizer must not accumulate gradients itself, or they would be "
    "accumulated twice. Received: gradient_accumulation_steps={steps}. Make "
    "the optimizer without, and use Trainer(accumulation={steps})."
)

OPTIMIZER_OF_OTHERS = (
    "optimizer must be new, or have been built for the model's trainable "
    "variables. Received: an optimizer built for other variables, which does "
    "not know {variable!r}. Give an optimizer that has not been used."
)

TRAINABLE_CHANGED = (
    "model must keep the trainable variables it had when the Trainer was "
    "made. Received: {now} trainable variables where there were {before}, or "
    "other ones. Make a new Trainer after changing layer.trainable."
)

NON_FINITE = (
    "gradients were not finite in {count} windows in a row after update "
    "{update}, more than max_consecutive_skips={limit}. The weights are those "
    "of update {update}. Lower the learning rate, check the data for NaN, or "
    "use max_consecutive_skips=None to go on regardless."
)


class NonFiniteError(ArithmeticError):
    """Too many windows in a row had a gradient that was not finite."""


class DataError(RuntimeError):
    """A data source broke its promise while training was running."""


CALLBACK_WITH_TRAINER_HOOK = (
    "{callback}.{hook} takes ({parameters}), which is how a Trainer's hook is "
    "written. Hooks of a Trainer are traced into the compiled step: they take "
    "tensors and return tensors. Hooks of a callback run on the host "
    "afterwards: they see numbers and return nothing. To change gradients or "
    "batches, write {hook} as a method of a subclass of Trainer; to observe, "
    "give the callback's hook the parameters ({position}, logs)."
)
