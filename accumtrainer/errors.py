"""Error classes, and the explanations too long to stand where they arise."""

UNKNOWN_KERAS = (
    "ACCUMTRAINER_KERAS must be 'keras' or 'keras_core'. Received: "
    "ACCUMTRAINER_KERAS={name!r}. Unset it to stand on Keras 3."
)

OTHER_KERAS = (
    "{name} must be made with {here}, on which accumtrainer stands here. "
    "Received: {received} of {other}. Set ACCUMTRAINER_KERAS={other} before "
    "accumtrainer is imported, or make it with {here}."
)

OTHER_STRATEGY = (
    "A Trainer must be used in the scope of the strategy in which its model "
    "was made, or in no scope. Received: the scope of another {strategy}. Make "
    "the model and the Trainer in `with strategy.scope():`, or leave the scope "
    "before using them."
)

KERAS_CORE_EMA = (
    "optimizer must not average weights with Keras Core, whose averages are "
    "wrong in a compiled update. Received: use_ema=True. Leave use_ema out, "
    "keep an average in Trainer.after_apply, or use Keras 3."
)

KERAS_CORE_CONSTRAINT = (
    "A Dense layer must have no constraint with Keras Core, which never "
    "applies it. Received: a constraint of {received}. Leave it out, assign "
    "the constrained weights in Trainer.after_apply, or use Keras 3."
)

KERAS_CORE_MASK = (
    "Nothing must make masks with Keras Core on JAX, which loses them in a "
    "compiled step. Received: {received}. Set KERAS_BACKEND=tensorflow, use "
    "Keras 3, or pass weights and attention masks as explicit arguments."
)

KERAS_CORE_FIT = (
    "GradientAccumulation must be used with Keras 3. Received: a model of "
    "Keras Core, whose fit runs in another way. Use a Trainer, which takes "
    "the same model, or make the model with keras."
)

KERAS_CORE_EVALUATION = (
    "model must not override test_step or make_test_function where a Trainer "
    "evaluates it with Keras Core on JAX. Received: one that does, and "
    "Model.evaluate there leaves out the first batch of a generator. Call "
    "model.evaluate with arrays and train without validation_data, or use "
    "Keras 3."
)

KERAS_CORE_STATISTICS = (
    "AccumulatedBatchNormalization must be used with Keras 3. Received: a "
    "layer of Keras Core, whose weights cannot be kept out of mixed precision. "
    "Use keras_core.layers.BatchNormalization, or make the model with keras."
)

KERAS_CORE_PENALTY = (
    "A model with a compute_loss of its own must have no weight regularizers "
    "with Keras Core on JAX, whose model.losses leaves them out in a compiled "
    "step. Received: {received}. Override Trainer.compute_loss instead, set "
    "KERAS_BACKEND=tensorflow, or use Keras 3."
)

KERAS_CORE_PAIRING = (
    "loss, y and sample_weight must have one entry for each output with Keras "
    "Core, which pairs them by place. Received: {counts}. Give a list or dict "
    "with an entry for every output; where one output needs no loss, give "
    "loss as a dict by output name and leave it out there."
)

NOT_WITH_REPLICAS = (
    "A model of several replicas must be trained as replicas can: compiled, on "
    "Keras 3, and exchanging nothing within an update. Received: {replicas} "
    "replicas, with {received}. Leave that out, or build the model outside of "
    "the strategy or distribution."
)

REPLICA_OF_PROCESSES = (
    "x must be arrays where one replica of the model is in several processes, "
    "the same ones in each. Received: a loader, which yields a share for each "
    "process. Give arrays, memory-mapped ones (numpy.memmap) if they are "
    "large, or a mesh that splits batches by process before anything else."
)

UNEQUAL_SHARES = (
    "Loaders of several processes must yield as many batches in each, of the "
    "same shapes and types. Received: {received}, after batch {batch} of epoch "
    "{epoch}. Pad or leave out what is left over (drop_remainder=True), or "
    "give steps_per_epoch, for which loaders begin again."
)

UNDIVIDED_SHARE = (
    "Each process's part of a micro-batch must divide evenly among its "
    "{devices} devices, where it has a loader of its own. Received: {size} "
    "samples, at batch {batch} of epoch {epoch}. Yield batches of a multiple "
    "of {devices} samples, and pad or leave out what is left over "
    "(drop_remainder=True)."
)

FAILED_ELSEWHERE = (
    "The data of every process must be usable, since none can go on alone. "
    "Received: an error in process {process}, whose own output says what it "
    "is. Repair that."
)

OTHER_EVALUATION = (
    "A loader of data to evaluate must yield the same in every process, not a "
    "share. Received: {received}, at batch {batch}. Give every process all of "
    "the data, in the same order."
)

OTHER_PROCESSES = (
    "Loaders must go on in as many processes as before, which have a share "
    "each. Received: data shared out among {now}, and among {before} when the "
    "run was saved. Start {before}, or begin an epoch after "
    "trainer.restore(path)."
)

CARRIED_SHARE = (
    "A run whose loaders yield shares cannot go on amid a tail that is "
    "carried on. Received: a checkpoint made while one was carried into epoch "
    "{epoch}, which holds the chief's share alone. Go on from a checkpoint "
    "made later in that epoch, or train with tail='flush' or 'drop'."
)

INSPECTION_OF_PROCESSES = (
    "inspect must be called where one process trains. Received: a Trainer in "
    "{processes} processes. Save a checkpoint, restore it in one process, and "
    "inspect the window there."
)

NOTHING_FITS = (
    "micro_batch_size='auto' must find a size that fits. Received: micro-"
    "batches of {size}, which take {peak} where the limit is "
    "{limit}. Raise memory_limit_bytes, or make the model smaller."
)

NO_MEMORY_LIMIT = (
    "memory_limit_bytes must be given with micro_batch_size='auto' where the "
    "device does not tell how much memory it has, as a CPU. Received: None. "
    "Write for example Accumulation(micro_batch_size='auto', "
    "memory_limit_bytes=4 * 2**30)."
)

MEMORY_IS_SECRET = (
    "micro_batch_size must be a number on this system, which does not tell how "
    "much memory a process takes. Received: 'auto'. Give a number, or use JAX, "
    "whose compiler knows."
)

EAGER_MEMORY = (
    "micro_batch_size must be a number with run_eagerly=True, where nothing "
    "plans memory. Received: 'auto'. Leave run_eagerly out, or give a number."
)

TOO_LARGE = (
    "The device ran out of memory with micro-batches of {before}; from here on "
    "they are of {after}. The update is the same."
)

LOSS_WITHOUT_REDUCTION = (
    "loss must have a reduction. Received: loss {loss!r} with reduction=None. "
    "Use reduction='sum' or 'sum_over_batch_size'."
)

BARE_LOSS = (
    "A loss must say what it was averaged over where an update has several "
    "micro-batches, because they may count differently. Received: a bare "
    "scalar from {origins}. {shown}{remedy}."
)

WRONG_DENOMINATOR = (
    "{stated} must be what a bare scalar was averaged over. Received: one from "
    "{origin}, which {shown}, as a trial with some of the data shows: updates "
    "are not those of the big batch. {remedy}."
)

NOT_A_WEIGHTED_LOSS = (
    "compute_loss must return a WeightedLoss or a dict of them by name. "
    "Received: {result!r}. Return WeightedLoss(mean, denominator), where "
    "denominator is what the mean was divided by."
)

OTHER_LOSSES = (
    "Losses must be alike, in number, names and kind, for all micro-batches "
    "whose parts are, whatever their sizes, since a window adds them up. "
    "Received: {received}, where the first micro-batch had {expected}. Let "
    "them depend on the parts of the data alone; a loss that does not apply "
    "may be 0, with a denominator of 0."
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

SPARSE = (
    "{name} must hold dense arrays, since windows stack them. Received: "
    "{received}. Make it dense (toarray() of SciPy, todense() of JAX, "
    "tf.sparse.to_dense, to_tensor() of a RaggedTensor); where the whole is "
    "too large for that, give a generator or a PyDataset that makes every "
    "batch dense."
)

TEXT = "{name} must hold numbers {rule}. Received: text. {remedy}"

NUMBER_LABELS = (
    "Number the classes: classes, y = np.unique(y, return_inverse=True); or "
    "use keras.layers.StringLookup beforehand."
)

NUMBER_TEXT = (
    "Turn it into numbers beforehand, for example by a "
    "keras.layers.TextVectorization in a tf.data pipeline."
)

TEXT_UNDER_XLA = (
    "jit_compile must be left out, or be False, where {name} holds text, which "
    "XLA does not know. Received: jit_compile=True. Leave it out, or turn the "
    "text into numbers beforehand, in a tf.data pipeline."
)

RAGGED_PREDICTIONS = (
    "x must lead to predictions of one shape but for the number of samples, "
    "because JAX has no ragged arrays to join others in. Received: predictions "
    "of shapes {before} and {now}. Pad x to one length (with a mask, if need "
    "be), or call predict once for each length."
)

EVERYTHING_DROPPED = (
    "tail='drop' must leave something to train on. Received: {batches} loader "
    "batches in epoch {epoch}, fewer than the {steps} of one update. Use "
    "tail='flush' or 'carry', fewer steps, or a smaller batch_size."
)

OTHER_DATA = (
    "Data must be the same when a run goes on amid an epoch. Received: "
    "{what}={now!r}, and {what}={before!r} when batch {batches} of epoch "
    "{epoch} was saved. Give the same data, or go on from a checkpoint made at "
    "the end of an epoch."
)

OTHER_STEPS = (
    "Epochs of a fixed number of batches must stay as they were when a run "
    "goes on, because each begins where the last one stopped. Received: "
    "{what}={now!r}, and {what}={before!r} when batch {batches} of epoch "
    "{epoch} was saved. Give the same steps_per_epoch and batch_size."
)

OTHER_BATCH_SIZE = (
    "batch_size must divide the samples already seen when a run goes on amid "
    "an epoch. Received: batch_size={now}, and batch_size={before} before, "
    "with {seen} samples seen. Give one that divides {seen}, or go on from a "
    "checkpoint made at the end of an epoch."
)

OTHER_ORDER = (
    "Data must come in the same order when a run goes on. Received: another "
    "batch than the last one before batch {batches} of epoch {epoch}. Give "
    "shuffle(seed=...) of tf.data a seed, or the generator of a torch "
    "DataLoader; use a new data set object, not one that was iterated before; "
    "or use fit(fast_forward=True), which runs through all past data."
)

CANNOT_GO_BACK = (
    "x must be able to go to where a saved run was. Received: an iterator of "
    "type {kind}, which can only begin at the beginning. Give arrays, a "
    "PyDataset, a tf.data or Grain dataset or another iterable that can be "
    "iterated again; or use fit(fast_forward=True), which takes and drops what "
    "the saved run has seen."
)

BATCH_HAS_CHANGED = (
    "The last batch before this place is not the one that the saved run saw: "
    "the PyDataset draws random numbers that nobody can restore, or its data "
    "have changed. Training goes on, but not as it would have without the "
    "interruption."
)

RAN_OUT = (
    "Your input ran out of data: it had {batches} loader batches where {steps} "
    "steps were asked for. The epoch, or the evaluation, ends with them. Give "
    "no more steps than the data hold, or data that repeat."
)

NO_MORE_EPOCHS = (
    "Your input ran out of data: it had nothing for epoch {epoch}, counting "
    "from 0. Training ends with the epochs before. Give data that can be "
    "iterated again (a list, a dataset, an object whose __iter__ starts "
    "afresh), or a generator that yields enough for all epochs."
)

NO_MORE_VALIDATION = (
    "Your validation_data ran out of data: they can be iterated only once. "
    "Training goes on without validation. Give data that can be iterated "
    "again, or a generator and validation_steps."
)

NO_BATCHES = (
    "A data source must yield at least one batch in every epoch. Received: "
    "none in epoch {epoch}. Give steps_per_epoch no larger than what the "
    "source holds per epoch, or a source that can be iterated again: a list, "
    "a dataset, or an object whose __iter__ starts afresh."
)

OTHER_PARTS = (
    "Every loader batch must have the same parts: x, y and sample_weight "
    "nested alike, of arrays with as many axes. Received: {received}, in "
    "batch {batch} of epoch {epoch} (counted from 0). Have the loader yield "
    "the same in every batch; a sample_weight of ones weighs all alike."
)

UNUSABLE_BATCH = (
    "Every loader batch must hold at least one sample, and as many in every "
    "array. Received: {received}, in batch {batch} of epoch {epoch} (counted "
    "from 0). Have the loader leave out what is empty or cut off."
)

OTHER_SIZE = (
    "{name} must keep the sizes that the model fixes. Received: {now} on axis "
    "{axis}, where it was {before}, in {place} (counted from 0). Bring every "
    "batch to {before} there, or make the model with None on that axis."
)

NOT_FINITE = (
    "{name} must be finite with check_inputs=True. Received: {value} in row "
    "{row} of {place} (counted from 0). Repair that sample, or give it a "
    "finite value and a sample_weight of 0."
)

INDEX_OUTSIDE = (
    "Ids and labels must be numbers of rows or classes that the model has: "
    "{name} takes 0 to {last}. Received: others, in the window that was run "
    "last, of which nothing was applied. Correct the data, or give the "
    "embedding more rows (input_dim) or the output more classes; "
    "fit(check_inputs=True) names the rows of wrong labels."
)

NO_SUCH_ROW = (
    "{name} must hold ids {rule}, as the Embedding that takes it has rows. "
    "Received: {value} in row {row} of {place} (counted from 0). Correct the "
    "id, or give the Embedding a larger input_dim."
)

NO_SUCH_CLASS = (
    "{name} must hold class numbers {rule}. Received: {value} in row {row} of "
    "{place} (counted from 0). Correct the label, give the output more "
    "classes, or use SparseCategoricalCrossentropy(ignore_class=...) if it "
    "means that there is none."
)

ENDLESS = (
    "{argument} must be given with data that never end. Received: "
    "{argument}=None with data of infinite length. Give {argument}, the "
    "number of loader batches to take{others}."
)

UNKNOWN_HOOK = (
    "A subclass of Trainer must define only methods that somebody calls. "
    "Received: {cls}.{name}, which is no hook. {remedy} The hooks are "
    "{hooks}."
)

UNKNOWN_ARGUMENT = (
    "{owner} must be given only arguments that it has. Received: {received}. "
    "{remedies}"
)

MODEL_WITH_OWN_STEP = (
    "model must not override {step}, because a Trainer would never call it. "
    "Received: {model}.{step}. Move what it does into {remedy}."
)

MODEL_WITH_OWN_TEST_STEP = (
    "model must not override test_step or make_test_function where several "
    "processes evaluate it. Received: {model} in {processes} processes, which "
    "Keras would evaluate each by itself. Call model.evaluate in one of them, "
    "and train without validation_data; or move what it does into "
    "Trainer.compute_loss (info.training is False)."
)

OWN_COMPILE = (
    "model must be compiled before a Trainer is made for it, where its own "
    "compile takes other arguments than those given. Received: "
    "{model}.compile{signature}, and {given}, to which it says: {error}. Leave "
    "out what it settles by itself, or call model.compile first, and then "
    "Trainer(model)."
)

NO_TARGETS = (
    "y must hold the targets of the loss {loss!r}. Received: None. Give fit x "
    "and y, and what takes one batch the pair (x, y); or train without a loss "
    "of targets, by layers that add losses or Trainer.compute_loss."
)

MIXED_WINDOW = (
    "The batches of one update must have the same losses, since a window adds "
    "them up. Received: batches amid a window of {steps} whose parts, and with "
    "them the number, names or kinds of losses, are others than of those "
    "before. Let the data change their parts between updates."
)

NO_LOSS = (
    "loss must be given. Received: loss=None for a model whose layers add no "
    "loss either. Give Trainer(loss=...), or override compute_loss."
)

NOTHING_TO_TRAIN = (
    "The model does not have any trainable weights. Losses and metrics of "
    "{model!r} are computed, and what moves in forward passes moves; nothing "
    "is trained, and optimizer.iterations stands still, as in Keras. To train, "
    "set layer.trainable = True before."
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

SEVERAL_OPTIMIZERS = (
    "optimizer must have a learning rate of its own. Received: a "
    "MultiOptimizer, whose optimizers have one each. Give one optimizer for "
    "all variables; where it is SGD, Trainer.on_apply can scale the gradients "
    "of some of them."
)

OPTIMIZER_OF_OTHERS = (
    "optimizer must be new, or have been built for the model's trainable "
    "variables. Received: an optimizer built for other variables, which does "
    "not know {variable!r}. Give an optimizer that has not been used."
)

TRAINABLE_CHANGED = (
    "model must be as trainable as it was when the Trainer was made. Received: "
    "{received}. Make a new Trainer after changing layer.trainable."
)

COMPILED_ANEW = (
    "model must stay compiled as its Trainer has left it, whose step updates "
    "the metrics of then. Received: the model {model!r}, compiled anew since, "
    "by hand or by another Trainer. Give that one, or a new Trainer(model), "
    "what is to go on."
)

MANY_SHAPES = (
    "Micro-batches should have few different shapes, because XLA compiles the "
    "step again for each of them. Received: arrays of a fourth set of shapes, "
    "{shapes}. Sort samples of similar length into a few buckets, or pad them "
    "to a multiple of a fixed length, for example of 64; keep to a few values "
    "of k where it changes. This is said once."
)

MANY_SHAPES_XLA = (
    " Or leave jit_compile='auto': then XLA compiles the first {count} shapes "
    "alone, and TensorFlow runs those that come later without it."
)

MODEL_WITH_OWN_TRAINING = (
    "model must not override {name}, because inside fit GradientAccumulation "
    "takes its place: several batches make one update, and what {name} does "
    "with a batch alone would be lost. Received: {model}.{name}. Move the "
    "loss into the model's compute_loss, which is honoured, or use a Trainer "
    "and its hooks."
)

OWN_TRAIN_FUNCTION = (
    "fit must be given one GradientAccumulation, and the model must not have a "
    "make_train_function of its own. Received: model {model!r}, whose "
    "make_train_function was replaced. Remove the other one."
)

DISTRIBUTED_FIT = (
    "GradientAccumulation trains on one device. Received: a model under "
    "tf.distribute or keras.distribution. Leave the strategy or distribution "
    "out."
)

FIT_ACCUMULATES_TWICE = (
    "optimizer must not accumulate gradients itself, or they would be "
    "accumulated twice. Received: gradient_accumulation_steps={steps}. Make "
    "the optimizer without, and use GradientAccumulation(steps={steps})."
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


class NothingLeftError(DataError):
    """A data source has nothing for an epoch, not even a first batch."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not belong to this training."""


class Preempted(SystemExit):
    """A signal asked training to stop, and it has stopped in good order.

    As a `SystemExit` it ends the program with status 128 + the signal's
    number, 143 for SIGTERM, unless somebody catches it.
    """


OTHER_VARIABLES = (
    "A checkpoint must belong to the same {part}. Received: {saved} in the "
    "checkpoint, where there is {here} here. Build the same one again, or "
    "begin a new run in another directory."
)

OTHER_CLASS = (
    "A checkpoint must belong to the same {part}. Received: one saved with "
    "{before}, while this Trainer has {now}. Use {before}, or take over the "
    "weights alone: trainer.restore(path, weights_only=True)."
)

NOT_BUILT = (
    "model must be built before it can be saved or restored. Received: the "
    "model {model!r}, which has no variables yet. Call it once on data, or "
    "give it an Input; fit(resume_from=...) builds it by itself."
)

NOT_OURS = (
    "path must be a new directory or a checkpoint to be replaced. Received: "
    "{path}, which holds something else. Choose another path."
)

UNREADABLE_CHECKPOINT = "The checkpoint {path} cannot be used: {reason}."

NO_GOOD_CHECKPOINT = (
    "At least one checkpoint must be good. Received: {path}, where all "
    "{count} are damaged or foreign; the newest is named above. Restore the "
    "directory from a copy, or move it away to begin anew."
)

NO_CHECKPOINT = (
    "There must be a checkpoint to go on from. Received: {path}, which has "
    "none. Check the path, or use resume_from='auto', which begins anew where "
    "there is none."
)

NO_SCORES = (
    "which='best' needs checkpoints with a score. Received: {path}, where none "
    "has one. Save with Checkpoint(keep_best='val_loss'), or use 'latest'."
)

CALLBACK_WITH_TRAINER_HOOK = (
    "{callback}.{hook} takes ({parameters}), which is how a Trainer's hook is "
    "written. Hooks of a Trainer are traced into the compiled step: they take "
    "tensors and return tensors. Hooks of a callback run on the host "
    "afterwards: they see numbers and return nothing. To change gradients or "
    "batches, write {hook} as a method of a subclass of Trainer; to observe, "
    "give the callback's hook the parameters ({position}, logs)."
)

NOT_WITH_A_WINDOW_LOSS = (
    "{name} must be left out of a WindowLossTrainer. Received: "
    "{name}={value!r}. Its loss is window_loss, which sees all examples of an "
    "update at once; put into that what {name} was meant to do."
)

NOT_TRACKED = (
    "A variable that hooks or layers write to must be part of the training, or "
    "nothing saves it and a skipped update does not put it back. Received: a "
    "write to {variable!r}, which is neither the model's nor tracked. Call "
    "self.track(...) on it before training."
)
