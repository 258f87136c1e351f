"""What is said of data: arrays, loaders, and shards of processes."""

UNEQUAL_SHARDS = (
    "Loaders of several processes must yield as many batches in each, of the "
    "same shapes and types. Received: {received}, after batch {batch} of epoch "
    "{epoch}. Pad or leave out what is left over (drop_remainder=True), or "
    "give steps_per_epoch, for which loaders begin again."
)

UNDIVIDED_SHARD = (
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
    "shard. Received: {received}, at batch {batch}. Give every process all of "
    "the data, in the same order."
)

OTHER_PROCESSES = (
    "Loaders must go on in as many processes as before, which have a shard "
    "each. Received: data shared out among {now}, and among {before} when the "
    "run was saved. Start {before}, or begin an epoch after "
    "trainer.restore(path)."
)

CARRIED_SHARD = (
    "A run whose loaders yield shards cannot go on amid a tail that is "
    "carried on. Received: a checkpoint made while one was carried into epoch "
    "{epoch}, which holds the chief's shard alone. Go on from a checkpoint "
    "made later in that epoch, or train with tail='flush' or 'drop'."
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
    "because only TensorFlow has ragged tensors to join others in. Received: "
    "predictions of shapes {before} and {now}. Pad x to one length (with a "
    "mask, if need be), or call predict once for each length."
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

SIZE_OF_LOADER = (
    "batch_size is not heeded, as in Keras, where x yields batches. Received: "
    "batch_size={size}, and a batch of {samples} samples. Have the loader "
    "yield batches of the size wanted, and leave batch_size out."
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

SAME_VALIDATION_LOGS = (
    "Sets of validation_data should have names that tell their numbers apart. "
    "{key} is of the set {one!r} and of the set {other!r}, and the former's is "
    "kept. Give one of the sets another name."
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
    "The batches of one update must have the same parts: x, y and "
    "sample_weight nested alike, of arrays with as many axes. Received: {now} "
    "in {name}, where the first batch of the update had {before}, in batch "
    "{batch} of epoch {epoch} (counted from 0). Have the loader yield the same "
    "in every batch; a sample_weight of ones weighs all alike."
)

UNUSABLE_BATCH = (
    "Every loader batch must hold at least one sample, and as many in every "
    "array. Received: {received}, in batch {batch} of epoch {epoch} (counted "
    "from 0). Have the loader leave out what is empty or cut off. Where a "
    "batch is one sample, as a graph of nodes and edges, give each array a "
    "first axis of 1."
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
    "{name} takes {range}. Received: others, in the window that was run "
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
