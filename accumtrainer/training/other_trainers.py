"""What other trainers call things, and what does their work here."""

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accumtrainer import errors
from accumtrainer.observers.callback import HOOKS as CALLBACK_HOOKS
from accumtrainer.window.hooks import HOOK_NAMES

METHODS = {
    "train_step": "compute_loss",
    "test_step": "compute_loss (info.training is False)",
    "training_step": "compute_loss",
    "validation_step": "compute_loss (info.training is False)",
    "test_dataloader": "the data given to evaluate",
    "train_dataloader": "the data given to fit",
    "val_dataloader": "fit(validation_data=)",
    "configure_optimizers": "Trainer(optimizer=)",
    "configure_gradient_clipping": "on_apply, or the optimizer's clipnorm",
    "optimizer_step": "on_apply",
    "backward": "on_accumulate",
    "on_before_optimizer_step": "on_apply",
    "on_after_backward": "on_accumulate",
    "on_before_backward": "compute_loss",
    "on_train_batch_start": "on_micro_batch",
    "training_epoch_end": "a callback's on_epoch_end",
    "create_optimizer": "Trainer(optimizer=)",
    "get_train_dataloader": "the data given to fit",
}
"""Methods that a subclass might define."""

_SYNONYMS_OF_STEPS = (
    "accumulate_grad_batches",
    "accumulation_steps",
    "grad_accum",
    "gradient_accumulation_steps",
    "grad_accumulation_steps",
)
_BATCHES = (
    "fit(batch_size=) for the samples of an update, and "
    "Accumulation(micro_batch_size=) for those of one pass"
)
_CHECKPOINT = "the callback Checkpoint"
_CLIPPING = "clipnorm=, global_clipnorm= or clipvalue= of the optimizer"
_DATA = "fit(x=), which takes loaders and datasets too"
_DATA_LOADING = "the loader's own settings, such as PyDataset(workers=)"
_DETERMINISM = "keras.utils.set_random_seed, and the backend's own switch"
_DEVICES = (
    "keras.distribution.set_distribution on JAX or tf.distribute on "
    "TensorFlow, before the model is made"
)
_EVALUATION = "fit(validation_every=Every(...)) or fit(validation_freq=)"
_LOGGER = "a callback such as WandbLogger or RunLog"
_LOGGER_EVERY = "every=Every(...) of the callback WandbLogger"
_MODEL = "the model you give"
_OPTIMIZER = "Trainer(optimizer=), a Keras optimizer with its settings"
_PRECISION = (
    "keras.mixed_precision.set_dtype_policy, before the model is made; "
    "Trainer(loss_scale=) scales the loss"
)
_RESUME = "fit(resume_from=)"
_SCHEDULE = (
    "a schedule of keras.optimizers.schedules as the optimizer's learning_rate"
)
_SPLIT = "batch_size of what fit is given, which is split among devices"
_UPDATES = "fit(max_updates=)"
_VALIDATION_DATA = "fit(validation_data=)"

ARGUMENTS = {
    "precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "amp": _PRECISION,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "dtype": _PRECISION,
    "auto_scale_loss": "Trainer(loss_scale=)",
    "accelerator": "KERAS_BACKEND, whose device is used",
    "device": "KERAS_BACKEND, whose device is used",
    "devices": _DEVICES,
    "gpus": _DEVICES,
    "tpu_cores": _DEVICES,
    "num_nodes": _DEVICES,
    "num_processes": _DEVICES,
    "strategy": _DEVICES,
    "distribute_strategy": _DEVICES,
    "sync_batchnorm": "accumtrainer.layers.AccumulatedBatchNormalization",
    "max_epochs": "fit(epochs=)",
    "num_train_epochs": "fit(epochs=)",
    "num_epochs": "fit(epochs=)",
    "max_duration": "fit(epochs=) or fit(max_updates=)",
    "min_epochs": "patience= or start_from_epoch= of what would stop it",
    "min_steps": "patience= or start_from_epoch= of what would stop it",
    "max_steps": _UPDATES,
    "max_time": "fit(max_seconds=)",
    **dict.fromkeys(_SYNONYMS_OF_STEPS, "Trainer(accumulation=)"),
    "steps": "Trainer(accumulation=)",
    "micro_batch_size": "Trainer(accumulation=Accumulation(...))",
    "tail": "Trainer(accumulation=Accumulation(...))",
    "combine": "Trainer(accumulation=Accumulation(...))",
    "device_train_microbatch_size": _BATCHES,
    "per_device_train_batch_size": _BATCHES,
    "auto_find_batch_size": "Accumulation(micro_batch_size='auto')",
    "per_device_eval_batch_size": "fit(validation_batch_size=)",
    "split_batches": _SPLIT,
    "gradient_clip_val": _CLIPPING,
    "gradient_clip_algorithm": _CLIPPING,
    "max_grad_norm": _CLIPPING,
    "clipnorm": _CLIPPING,
    "global_clipnorm": _CLIPPING,
    "clipvalue": _CLIPPING,
    "logger": _LOGGER,
    "loggers": _LOGGER,
    "report_to": _LOGGER,
    "log_with": _LOGGER,
    "project_name": _LOGGER,
    "run_name": _LOGGER,
    "logging_dir": _LOGGER,
    "log_every_n_steps": _LOGGER_EVERY,
    "logging_steps": _LOGGER_EVERY,
    "logging_strategy": _LOGGER_EVERY,
    "ckpt_path": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "load_path": _RESUME,
    "enable_checkpointing": _CHECKPOINT,
    "default_root_dir": _CHECKPOINT,
    "output_dir": _CHECKPOINT,
    "save_folder": _CHECKPOINT,
    "save_steps": _CHECKPOINT,
    "save_strategy": _CHECKPOINT,
    "save_total_limit": _CHECKPOINT,
    "load_best_model_at_end": "Checkpoint(keep_best=)",
    "metric_for_best_model": "Checkpoint(keep_best=)",
    "train_dataloader": _DATA,
    "train_dataloaders": _DATA,
    "train_dataset": _DATA,
    "datamodule": _DATA,
    "data_collator": _DATA,
    "dataset": _DATA,
    "data": _DATA,
    "val_dataloader": _VALIDATION_DATA,
    "val_dataloaders": _VALIDATION_DATA,
    "eval_dataloader": _VALIDATION_DATA,
    "eval_dataset": _VALIDATION_DATA,
    "workers": _DATA_LOADING,
    "num_workers": _DATA_LOADING,
    "dataloader_num_workers": _DATA_LOADING,
    "use_multiprocessing": _DATA_LOADING,
    "max_queue_size": _DATA_LOADING,
    "limit_train_batches": "fit(steps_per_epoch=)",
    "limit_val_batches": "fit(validation_steps=)",
    "limit_test_batches": "evaluate(steps=)",
    "limit_predict_batches": "predict(steps=)",
    "val_check_interval": _EVALUATION,
    "check_val_every_n_epoch": _EVALUATION,
    "eval_steps": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "evaluation_strategy": _EVALUATION,
    "eval_interval": _EVALUATION,
    "num_sanity_val_steps": "fit(fast_dev_run=)",
    "enable_progress_bar": "fit(verbose=)",
    "disable_tqdm": "fit(verbose=)",
    "enable_model_summary": "model.summary()",
    "deterministic": _DETERMINISM,
    "full_determinism": _DETERMINISM,
    "random_state": "Trainer(seed=)",
    "profiler": "the callback Profile",
    "detect_anomaly": "the callback NaNLocator",
    "args": "the arguments of Trainer and of fit",
    "optimizers": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "learning_rate": _OPTIMIZER,
    "lr": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "schedulers": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_type": _SCHEDULE,
    "warmup_steps": _SCHEDULE,
    "warmup_ratio": _SCHEDULE,
    "loss_fn": "Trainer(loss=)",
    "compute_metrics": "Trainer(metrics=)",
    "torch_compile": "Trainer(jit_compile=)",
    "compile": "Trainer(jit_compile=)",
    "steps_per_execution": "nothing: an update is one compiled call anyway",
    "gradient_checkpointing": "keras.RematScope, before the model is made",
    "model_init": _MODEL,
    "tokenizer": _DATA,
    "processing_class": _DATA,
}
"""Arguments of their constructors, and of their fit."""

WITHIN_FIT = {
    **dict.fromkeys(_SYNONYMS_OF_STEPS, "steps="),
    "k": "steps=",
    "accumulation": "steps=",
    "micro_batch_size": "batch_size= of fit, which is that of a micro-batch",
    "tail": "nothing: the last update of an epoch takes what is left",
    "precision": "keras.mixed_precision.set_dtype_policy",
    "dtype": "keras.mixed_precision.set_dtype_policy",
}
"""Arguments that `GradientAccumulation` might be given."""

NOT_BY_NAME = ("self", "model", "others")


def check_subclass(trainer_type: type, base: type) -> None:
    """Refuse methods of a Trainer's subclass that nobody would call.

    Args:
        trainer_type: the class of the Trainer being made.

    Raises:
        TypeError: such a method exists; the message names its replacement.
    """
    known = set(dir(base))
    own = (set(vars(c)) for c in trainer_type.__mro__ if c not in base.__mro__)
    for name in sorted(set().union(*own) - known):
        if name in METHODS:
            remedy = f"Its work is done by {METHODS[name]}."
        elif name in CALLBACK_HOOKS:
            remedy = f"Its work is done by a callback's {name}."
        elif name.startswith(("on_", "after_")):
            close = difflib.get_close_matches(name, HOOK_NAMES, n=1, cutoff=0)
            remedy = f"Did you mean {close[0]}?"
        else:
            continue
        raise TypeError(
            errors.UNKNOWN_HOOK.format(
                cls=trainer_type.__name__,
                name=name,
                hooks=", ".join(HOOK_NAMES),
                remedy=remedy,
            )
        )


def refuse_arguments(
    owner: str,
    others: dict[str, Any],
    function: Callable[..., Any],
    *elsewhere: tuple[Callable[..., Any], str],
    replacements: Mapping[str, str] = ARGUMENTS,
) -> None:
    """Refuse arguments that a function does not have.

    Args:
        owner: what was called, as the user wrote it.
        others: dict of the arguments it does not have.
        *elsewhere: pairs of a function that may have them, and how to call
            it, with a place for the argument's name.
        replacements: dict from further arguments to what replaces them.

    Raises:
        TypeError: there are some; the message says what replaces them.
    """
    if not others:
        return
    received = ", ".join(f"{k}={reprlib.repr(v)}" for k, v in others.items())
    own = [name for name in _parameters(function) if name not in others]
    remedies = [_remedy(name, own, elsewhere, replacements) for name in others]
    raise TypeError(
        errors.UNKNOWN_ARGUMENT.format(
            owner=owner,
            received=received,
            remedies=" ".join(dict.fromkeys(remedies)),
        )
    )


def _remedy(
    name: str,
    own: Iterable[str],
    elsewhere: Iterable[tuple[Callable[..., Any], str]],
    replacements: Mapping[str, str],
) -> str:
    """Say in a sentence what to write in the place of an argument."""
    for function, call in elsewhere:
        if name in _parameters(function):
            return f"Say {call.format(name=name)}."
    if name in replacements:
        return f"Instead of {name} use {replacements[name]}."
    close = difflib.get_close_matches(name, own, n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Leave {name} out; there are {', '.join(own)}."


def _parameters(function: Callable[..., Any]) -> list[str]:
    names = inspect.signature(function).parameters
    return [name for name in names if name not in NOT_BY_NAME]
