"""What other trainers call things, and what does their work here."""

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import keras, overrides
from accumtrainer.observers.callback import HOOKS as CALLBACK_HOOKS
from accumtrainer.window.hooks import HOOK_NAMES


def _by_name(*rows: tuple[str, str]) -> dict[str, str]:
    """Make a dict from each name to what replaces it.

    Args:
        *rows: pairs of names, with spaces between them, and their replacement.

    Examples:
        >>> _by_name(("max_epochs num_epochs", "fit(epochs=)"))
        {'max_epochs': 'fit(epochs=)', 'num_epochs': 'fit(epochs=)'}
    """
    return {
        name: replacement
        for names, replacement in rows
        for name in names.split()
    }


METHODS = _by_name(
    ("train_step training_step on_before_backward", "compute_loss"),
    ("test_step validation_step", "compute_loss (info.training is False)"),
    ("test_dataloader", "the data given to evaluate"),
    ("train_dataloader get_train_dataloader", "the data given to fit"),
    ("val_dataloader", "fit(validation_data=)"),
    ("configure_optimizers create_optimizer", "Trainer(optimizer=)"),
    ("configure_gradient_clipping", "on_apply, or the optimizer's clipnorm"),
    ("optimizer_step on_before_optimizer_step", "on_apply"),
    ("backward on_after_backward", "on_accumulate"),
    ("on_train_batch_start", "on_micro_batch"),
    ("training_epoch_end", "a callback's on_epoch_end"),
)
"""Methods that a subclass might define."""

_SYNONYMS_OF_STEPS = (
    "accumulate_grad_batches accumulation_steps grad_accum "
    "gradient_accumulation_steps grad_accumulation_steps"
)

_OF_KERAS = _by_name(
    ("accelerator device", "KERAS_BACKEND, whose device is used"),
    (
        "gradient_clip_val gradient_clip_algorithm max_grad_norm clipnorm "
        "global_clipnorm clipvalue",
        "clipnorm=, global_clipnorm= or clipvalue= of the optimizer",
    ),
    (
        "workers num_workers dataloader_num_workers use_multiprocessing "
        "max_queue_size",
        "the loader's own settings, such as PyDataset(workers=)",
    ),
    ("enable_model_summary", "model.summary()"),
    (
        "deterministic full_determinism",
        "keras.utils.set_random_seed, and the backend's own switch",
    ),
    (
        "schedulers lr_scheduler lr_scheduler_type warmup_steps warmup_ratio",
        "a schedule of keras.optimizers.schedules as the optimizer's "
        "learning_rate",
    ),
    ("gradient_checkpointing", "keras.RematScope, before the model is made"),
)
"""Arguments that Keras itself replaces, with a Trainer and without."""

ARGUMENTS = _OF_KERAS | _by_name(
    (
        "precision mixed_precision amp fp16 bf16 dtype",
        "keras.mixed_precision.set_dtype_policy, before the model is made; "
        "Trainer(loss_scale=) scales the loss",
    ),
    ("auto_scale_loss", "Trainer(loss_scale=)"),
    (
        "devices gpus tpu_cores num_nodes num_processes strategy "
        "distribute_strategy",
        "keras.distribution.set_distribution on JAX or tf.distribute on "
        "TensorFlow, before the model is made",
    ),
    ("sync_batchnorm", "accumtrainer.layers.AccumulatedBatchNormalization"),
    ("max_epochs num_train_epochs num_epochs", "fit(epochs=)"),
    ("max_duration", "fit(epochs=) or fit(max_updates=)"),
    (
        "min_epochs min_steps",
        "patience= or start_from_epoch= of what would stop it",
    ),
    ("max_steps", "fit(max_updates=)"),
    ("max_time", "fit(max_seconds=)"),
    (_SYNONYMS_OF_STEPS, "Trainer(accumulation=)"),
    ("steps", "Trainer(accumulation=)"),
    (
        "micro_batch_size tail combine",
        "Trainer(accumulation=Accumulation(...))",
    ),
    (
        "device_train_microbatch_size per_device_train_batch_size",
        "fit(batch_size=) for the samples of an update, and "
        "Accumulation(micro_batch_size=) for those of one pass",
    ),
    ("auto_find_batch_size", "Accumulation(micro_batch_size='auto')"),
    ("per_device_eval_batch_size", "fit(validation_batch_size=)"),
    (
        "split_batches",
        "batch_size of what fit is given, which is split among devices",
    ),
    (
        "logger loggers report_to log_with project_name run_name logging_dir",
        "a callback such as WandbLogger or RunLog",
    ),
    (
        "log_every_n_steps logging_steps logging_strategy",
        "every=Every(...) of the callback WandbLogger",
    ),
    (
        "ckpt_path resume_from_checkpoint load_path",
        "fit(resume_from=), or restore(path) beforehand",
    ),
    (
        "enable_checkpointing default_root_dir output_dir save_folder "
        "save_steps save_strategy save_total_limit",
        "the callback Checkpoint",
    ),
    ("load_best_model_at_end metric_for_best_model", "Checkpoint(keep_best=)"),
    (
        "train_dataloader train_dataloaders train_dataset datamodule "
        "data_collator dataset data tokenizer processing_class",
        "fit(x=), which takes loaders and datasets too",
    ),
    (
        "val_dataloader val_dataloaders eval_dataloader eval_dataset",
        "fit(validation_data=)",
    ),
    ("limit_train_batches", "fit(steps_per_epoch=)"),
    ("limit_val_batches", "fit(validation_steps=)"),
    ("limit_test_batches", "evaluate(steps=)"),
    ("limit_predict_batches", "predict(steps=)"),
    (
        "val_check_interval check_val_every_n_epoch eval_steps eval_strategy "
        "evaluation_strategy eval_interval",
        "fit(validation_every=Every(...)) or fit(validation_freq=)",
    ),
    ("num_sanity_val_steps", "fit(fast_dev_run=)"),
    ("enable_progress_bar disable_tqdm", "fit(verbose=)"),
    ("random_state", "Trainer(seed=)"),
    ("profiler", "the callback Profile"),
    ("detect_anomaly", "the callback NaNLocator"),
    ("args", "the arguments of Trainer and of fit"),
    (
        "optimizers optim learning_rate lr weight_decay adam_beta1 adam_beta2 "
        "adam_epsilon",
        "Trainer(optimizer=), a Keras optimizer with its settings",
    ),
    (
        "d_optimizer g_optimizer disc_optimizer gen_optimizer "
        "discriminator_optimizer generator_optimizer",
        "a Trainer for each optimizer, by turns, as examples/gan.py does",
    ),
    ("loss_fn", "Trainer(loss=)"),
    ("compute_metrics", "Trainer(metrics=)"),
    ("torch_compile compile", "Trainer(jit_compile=)"),
    ("steps_per_execution", "nothing: an update is one compiled call anyway"),
    ("model_init", "the model you give"),
)
"""Arguments of their constructors, and of their fit."""

WITHIN_FIT = _OF_KERAS | _by_name(
    (_SYNONYMS_OF_STEPS, "steps="),
    ("k accumulation", "steps="),
    ("micro_batch_size", "batch_size= of fit, which is that of a micro-batch"),
    ("tail", "nothing: the last update of an epoch takes what is left"),
    ("precision dtype", "keras.mixed_precision.set_dtype_policy"),
)
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


def refuse_others(
    trainer_type: Any, method: str, others: dict[str, Any]
) -> None:
    """Refuse arguments that a method of a Trainer does not have.

    Args:
        trainer_type: the Trainer's class.
        method: the method's name.
        others: dict of the arguments it does not have.

    Raises:
        TypeError: there are some; the message says what replaces them.
    """
    # What is compared with targets is given to an evaluation.
    sibling = "evaluate" if method == "predict" else "fit"
    refuse_arguments(
        method,
        others,
        getattr(trainer_type, method),
        (getattr(trainer_type, sibling), sibling + "({name}=)"),
        (trainer_type.fit, "fit({name}=)"),
        (trainer_type.__init__, "Trainer({name}=)"),
    )


def refuse_to_construct(
    trainer: Any, base: Any, model: Any, others: dict[str, Any]
) -> None:
    """Refuse arguments that the constructor of a Trainer does not have.

    Args:
        trainer: the Trainer being made.
        base: `Trainer`.
        model: what it is given; its own `compile` may take further ones.
        others: dict of the arguments it does not have.

    Raises:
        TypeError: there are some; the message says what replaces them.
    """
    elsewhere = [(base.fit, "fit({name}=)")]
    if isinstance(model, keras.Model) and overrides(model, "compile"):
        first = "model.compile({name}=), with all that it takes, beforehand"
        elsewhere.append((model.compile, first))
    refuse_arguments(type(trainer).__name__, others, base.__init__, *elsewhere)


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
