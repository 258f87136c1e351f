"""What is said of a run: memory, shapes, checkpoints, bad windows."""

REPLICA_OF_PROCESSES = (
    "x must be arrays where one replica of the model is in several processes, "
    "the same ones in each. Received: a loader, which yields a shard for each "
    "process. Give arrays, memory-mapped ones (numpy.memmap) if they are "
    "large, or a mesh that splits batches by process before anything else."
)

NOT_A_WINDOW = (
    "window must be a Window that was run, such as trainer.last_window. "
    "Received: a {received.__name__}. Train on the data to look at by "
    "train_on_batch, and call inspect() then."
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
    "device does not tell how much memory it has, as a CPU, or TensorFlow "
    "does not. Received: None. "
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
    "plans memory. Received: 'auto'. Leave run_eagerly out, of compile too, or "
    "give a number."
)

TOO_LARGE = (
    "The device ran out of memory with micro-batches of {before}; from here on "
    "they are of {after}. The update is the same."
)

MANY_SHAPES = (
    "Micro-batches should have few different shapes, because XLA compiles the "
    "step again for each of them. Received: arrays of a fourth set of shapes, "
    "{shapes}. Sort samples of similar length into a few buckets, or pad them "
    "to a multiple of a fixed length, for example of 64; keep to a few values "
    "of k where it changes. This is said once."
)

SMALLER_MICRO_BATCH = (
    "Samples of the micro-batch that provoked this: {few}; of the largest in "
    "the same update, which did not: {many}. The last micro-batch of a batch "
    "is smaller where micro_batch_size does not divide it, and so is the last "
    "batch of data that their batch size does not divide."
)

MANY_CHANGES = (
    "What layers, losses, optimizers and hooks are made of should stay from "
    "window to window, because PyTorch's windows are recorded, and where it "
    "changes all the time they run operation by operation instead, which is "
    "slower. Received: {what}, changed four times, every few windows. Keep "
    "what windows do not need, as counters and histories, in an object that no "
    "layer, loss or hook holds, and what they need, as a weight of a loss, in "
    "a variable. This is said once for each time that it begins."
)

MANY_SHAPES_XLA = (
    " Or leave jit_compile='auto': then XLA compiles the first {count} shapes "
    "alone, and TensorFlow runs those that come later without it."
)

WITHOUT_XLA = (
    "XLA cannot compile what windows compute, and they run without it, as "
    "Keras's own do on a CPU. It says: {error}. Trainer(jit_compile=False) "
    "begins without it."
)

WITHOUT_TORCH_COMPILE = (
    "torch.compile cannot compile what windows compute, and they run without "
    "it. It says: {error}. Trainer(jit_compile=False) begins without it."
)

NON_FINITE = (
    "gradients were not finite in {count} windows in a row after update "
    "{update}, more than max_consecutive_skips={limit}. The weights are those "
    "of update {update}. Lower the learning rate, check the data for NaN, or "
    "use max_consecutive_skips=None to go on regardless."
)

OTHER_VARIABLES = (
    "A checkpoint must belong to the same {part}. Received: {saved} in the "
    "checkpoint, where there is {here} here. Build the same one again, with "
    "the same layers trainable, or begin a new run in another directory."
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

MEDIA_OUTSIDE = (
    "log_media must be called while training runs, from a callback. Received: "
    "{name!r} outside of it. Use the tool of the logger itself there."
)

NEEDS_TRAINER = (
    "{callback} must be given to a Trainer, whose counters and numbers it "
    "reads. Received: it among the callbacks of a plain keras.Model. Train by "
    "Trainer(model, accumulation=...).fit, which takes the same data; inside "
    "Model.fit use callbacks of Keras, such as keras.callbacks.CSVLogger or "
    "wandb.integration.keras.WandbMetricsLogger."
)

NO_MEDIA = (
    "{name!r} is left out: no logger takes a value of type {kind}. Loggers: "
    "{loggers}. WandbLogger and TrackioLogger take images, histograms, text "
    "and tables."
)

NO_ARTIFACT = (
    "The checkpoint {place!r} could not be had from W&B: {reason}. Check "
    "entity, project, name and alias, and that `wandb login` was run here."
)

SETTLED = (
    "{name} must be given when a {kind} is made, and stays. Received: "
    "{name} = {value!r} for one that is there. Make another one with the same "
    "model and optimizer."
)

NOT_SAVED = (
    "{name} has changed in training, and no checkpoint keeps it: it is not "
    "made of numbers, strings, arrays, tensors, lists, tuples, sets and dicts. "
    "A run that goes on begins with what it is given there. Keep what it is "
    "made of, or derive the callback from accumtrainer.Callback, with "
    "has_state = True, get_state and set_state. This is said once."
)

NEW_NOT_SAVED = (
    "{name} is a variable that was made in training, and no checkpoint keeps "
    "it: a run that goes on has none to put its value into. Make it before "
    "training begins, or in on_train_begin. This is said once."
)

NOT_PUT_BACK = (
    "{name} is a variable in the checkpoint, and there is none of its shape "
    "now, so it begins anew. Make the same variables in the same places before "
    "training begins, or in on_train_begin."
)

OTHER_VARIABLES_OF_LOSSES = (
    "The losses have other variables than in the checkpoint: {saved} there, "
    "{here} here. They keep the values that they have."
)

KIND_NOT_SAVED = (
    "{name} holds a {kind}, of which a run that goes on reads what it is made "
    "of, as a plain number, string, tuple or dict. Keep plain values there, or "
    "derive the callback from accumtrainer.Callback, with has_state = True, "
    "get_state and set_state. This is said once."
)
