"""What is said of models, losses, optimizers and hooks, before they train."""

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
    "the strategy or distribution; on PyTorch, before "
    "torch.distributed.init_process_group."
)

WRAPPED_MODEL = (
    "model must be a keras.Model. Received: {wrapper}, with a {model} in it. "
    "Give the Trainer the model itself, model.module. Where several processes "
    "have joined by torch.distributed, it adds their gradients up, once per "
    "update; DistributedDataParallel would after every micro-batch."
)

WRITTEN_PER_EXAMPLE = (
    "With per_example=True no example must change a variable, since all run at "
    "once; random states aside, and what compiled metrics keep. Received: "
    "changes of {paths}. Put a layer without such state in the place of that "
    "one, for example GroupNormalization for BatchNormalization, freeze it, "
    "use self.log in hooks, or leave per_example out."
)

NOT_VECTORIZED = (
    "per_example=True runs the examples of a micro-batch one after the other "
    "here, and so no faster than one by one: TensorFlow cannot vectorize an "
    "operation of the model. It said: {reason} Replace the layer, "
    "as with unroll=True in a recurrent one, or set KERAS_BACKEND=jax."
)

PER_EXAMPLE_WINDOW_LOSS = (
    "per_example=True must come with a loss of single examples. Received: "
    "{trainer}, whose window_loss compares those of a window. Leave "
    "per_example out."
)

LOSS_WITHOUT_REDUCTION = (
    "loss must have a reduction, by which it is one number. Received: loss "
    "{loss!r} of shape {shape}. Use reduction='sum_over_batch_size', or 'sum', "
    "as Keras takes values of examples on TensorFlow. If its class takes "
    "neither, give a function that calls it, whose values are averaged."
)

LOSSES_OF_SEVERAL_SHAPES = (
    "losses without a reduction must all have as many values, because they "
    "are added up value by value, where Keras would count one of them for "
    "each value of another. Received: losses of shapes {shapes}. Give all of "
    "them the same reduction, as 'sum_over_batch_size' or 'sum'."
)

VALUES_OF_NO_EXAMPLES = (
    "Several values of a loss must add up over examples where an update has "
    "several micro-batches, because their sum is descended, as in Keras. "
    "Received: {origin}. {shown}Have it be one number, and say "
    "{owner}(denominator=...) what that was averaged over, or choose "
    "{combine}(combine='mean') for the plain mean over micro-batches."
)

BARE_LOSS = (
    "A loss must say what it was averaged over where an update has several "
    "micro-batches, because they may count differently. Received: a bare "
    "scalar from {origins}. {shown}{remedy}."
)

NO_SUM_OVER_SAMPLES = (
    "An activity regularizer must return a sum over samples where an update "
    "has several micro-batches, because Keras divides what it returns by the "
    "batch size. Received: {regularizer}, and a trial with some of the data "
    "shows that {shown}. Have it return such a sum, as keras.regularizers.L1 "
    "and L2 do; or leave it out; or choose {combine}(combine='mean') for the "
    "plain mean over micro-batches."
)

REDUCED_LOSS = "the loss {loss!r}, whose values are not one per example"

PAIRED = " of outputs that pair examples"
DEPENDENT = (
    ", whose value of one example depends on the others, on their number or on "
    "its place among them"
)
ROWLESS = ", whose outputs have no axis but that of examples"
OF_VALUES = ", which is several values"
PAIRING_OUTPUTS = "the loss {loss!r}" + PAIRED
COUPLING_LOSS = "the loss {loss!r}" + DEPENDENT
LOSS_OF_ROWLESS = "the loss {loss!r}" + ROWLESS
"""What is told of some kinds of losses, and how that ends."""

CONSTANT_LOSS = (
    "A loss should say what it was averaged over where an update has several "
    "micro-batches. Received: a bare scalar from {origins}. {shown}So it is "
    "taken for a mean over samples, and counts once per update. Say "
    "{owner}(denominator='samples') to state that."
)

WRONG_DENOMINATOR = (
    "{stated} must be what a bare scalar was averaged over. Received: one from "
    "{origin}, which {shown}, as a trial with some of the data shows: updates "
    "are not those of the big batch. {remedy}."
)

UNCHECKED_DENOMINATOR = (
    "denominator='samples' should be shown to be right by a trial with some of "
    "the data. Received: a bare scalar from {origins}, of which that shows "
    "nothing: if it is no mean over samples, updates are not those of the big "
    "batch. Compare them by Trainer.check_equivalence; or say "
    "{owner}(denominator=fn) with a function of a batch that gives what it was "
    "averaged over, which is taken without this warning."
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

LOG_NAME_TAKEN = (
    "self.log must be given a name of its own, as one of two values of a name "
    "would not be seen. Received: {name!r}, under which a loss, a metric or a "
    "number of the window is logged. Choose another name."
)

WRONG_STRUCTURE = "{hook} must return {rule}. Received: {received}."

UNSUPPORTED_BACKEND = (
    "Keras must run on a supported backend: {supported}. Received: "
    "KERAS_BACKEND={backend!r}. Set KERAS_BACKEND to one of them before Keras "
    "is imported, and install accumtrainer[{first}], for example."
)

KERAS_CORE_ON_TORCH = (
    "Keras Core must run on TensorFlow or JAX. Received: KERAS_BACKEND='torch' "
    "with ACCUMTRAINER_KERAS='keras_core'. Use Keras 3, which is Keras Core "
    "under its last name, or another backend."
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

MODEL_WITH_OWN_TRAIN_STEP = (
    "model must not override train_step, which takes a whole batch, because a "
    "Trainer trains on micro-batches. Received: {model}.train_step. {remedy} "
    "docs/train_step.md says which part of a train_step goes into which hook."
)

REPLACED_BY_KERAS = (
    "Leave it out, as it only hands data on to Keras's own, which honours the "
    "model's compute_loss; where the class is a library's, in a subclass with "
    "train_step = keras.Model.train_step. What it does to the data belongs in "
    "the data pipeline, or in a Trainer's on_micro_batch. A test_step that "
    "does the same goes the same way."
)

REPLACED_BY_COMPILED_LOSS = (
    "Remove it, and nothing else: its loss is that of Model.compile or of the "
    "model's compute_loss, which a Trainer takes by itself."
)

REPLACED_BY_A_LOSS = """Remove it, and use {model}Trainer instead of Trainer:

    class {model}Trainer(Trainer):
        def compute_loss(self, batch, info):
{hook}

"""

OF_A_MEAN = (
    "where the second part of WeightedLoss is what the loss was averaged over. "
    "One that compares examples with each other is for a WindowLossTrainer."
)

OF_A_SUM = (
    "where None says that the loss is a sum: it has a value for each example, "
    "and a tape takes the gradient of their sum. Logs show their mean."
)

REPLACED_BY_HOOKS = """Remove it, and let hooks do what it does:

    class {model}Trainer(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            losses = ...  # of each sample
            return WeightedLoss(ops.mean(losses), ops.shape(losses)[0])
            # or, where a tape was given losses and so took their sum:
            # return WeightedLoss(losses, None)

        def on_apply(self, gradients, info):
            return gradients  # changed as train_step changes them

        def after_apply(self, info):
            ...  # what follows the optimizer, such as a moving average

Two optimizers of two models are two Trainers in turns. A loss that compares
examples with each other is for a WindowLossTrainer."""

LOSSES_LEFT_OUT = (
    " It leaves out what regularizers and add_loss give, which a Trainer adds "
    "to every loss: to train as before, remove them from the layers."
)

TEST_STEP_TOO = (
    " Its test_step may go too: compute_loss is called in validation as well, "
    "where info.training is false."
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
    "and y; give check_equivalence and memory_plan their batch as the pair "
    "(x, y); or train without a loss of targets, by layers that add losses or "
    "Trainer.compute_loss."
)

FROZEN_AMID_WINDOW = (
    "Layers must be frozen or unfrozen between updates, since a window adds up "
    "the gradients of the same weights. Received: another trainable attribute "
    "after {batches} batches of a window. Set it when an epoch begins, or in "
    "on_train_batch_end of a window's last batch."
)

COMPILED_AMID_WINDOW = (
    "A model must be compiled again, get another optimizer, or have its train "
    "function made again between updates, since a window adds up the gradients "
    "of one model. Received: such a change after {batches} batches of a window."
    " Make it when an epoch begins or ends, or in on_train_batch_end of a "
    "window's last batch; in on_train_batch_begin by a callback that is listed "
    "before GradientAccumulation."
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

OVERRIDDEN_LOSS_SCALING = (
    "optimizer must not scale the loss itself. Received: {optimizer}, which "
    "overrides scale_loss. Leave the override out, and use "
    "Trainer(loss_scale=LossScale(initial=...)) where gradients in float16 "
    "would vanish."
)

OPTIMIZER_ACCUMULATES = (
    "optimizer must not accumulate gradients itself, or they would be "
    "accumulated twice. Received: gradient_accumulation_steps={steps}. Make "
    "the optimizer without it: Trainer(accumulation={steps}) or "
    "GradientAccumulation(steps={steps}) accumulates."
)

OPTIMIZER_OF_OTHERS = (
    "optimizer must be new, or have been built for the model's trainable "
    "variables. Received: an optimizer built for other variables, which does "
    "not know {variable!r}. Give an optimizer that has not been used."
)

OPTIMIZER_OF_TORCH = (
    "optimizer must compute with the gradients that apply() is given. "
    "Received: {optimizer}, which keeps one of torch.optim, {inner}: that "
    "reads `.grad` of parameters, where windows leave none. "
    "Give an optimizer of Keras's, or one that computes in its update_step()."
)

COMPILED_ANEW = (
    "model must stay compiled as its Trainer has left it, whose step updates "
    "the metrics of then. Received: the model {model!r}, compiled anew since, "
    "by hand or by another Trainer. Give that one, or a new Trainer(model), "
    "what is to go on."
)

OTHER_OPTIMIZER = (
    "model.optimizer must stay trainer.optimizer, which windows are compiled "
    "with. Received: another one since the Trainer was made, a {now} as "
    "model.optimizer beside a {before} as trainer.optimizer. Go on with "
    "Trainer(model, optimizer=...), or change the settings of the one there "
    "is: trainer.optimizer.learning_rate = 0.1"
)

MODEL_WITH_OWN_TRAINING = (
    "model must not override {name}, because inside fit GradientAccumulation "
    "takes its place: several batches make one update, and what {name} does "
    "with a batch alone would be lost. Received: {model}.{name}. {remedy}"
)

MOVED_INTO_COMPUTE_LOSS = (
    "Move the loss into the model's compute_loss, which is honoured, or use a "
    "Trainer and its hooks, as docs/train_step.md shows."
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
    "A variable that hooks, layers or losses write to must be part of the "
    "training, or nothing saves it and a skipped update does not put it back. "
    "Received: a write to {variable!r}, which is neither the model's nor "
    "tracked. Make it an attribute of the model or of one of its layers before "
    "they are built; or, with a Trainer, call self.track(...) on it before "
    "training."
)

UNREAD_RESULTS = (
    "compute_metrics should return what get_metrics_result returns, which is "
    "read once per update for the logs. Received: {names} of {model}, from "
    "compute_metrics alone, which no logs will hold. Let get_metrics_result "
    "return it, or make it a metric of the model."
)
