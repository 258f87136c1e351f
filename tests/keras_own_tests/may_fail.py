"""Which tests of Keras may fail through a `Trainer`, and why.

Each of them must fail: one that passes fails the run, as does a pattern that
names no test.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

WRITTEN_FOR = "3.15.1"
"""The version of Keras whose tests are named here."""

ALL = ("tensorflow", "jax", "torch")


@dataclass(frozen=True, kw_only=True)
class MayFail:
    """Tests that fail for one reason.

    Args:
        file: where they stand, from `keras/src` on.
        tests: their names, `*` for any part of one.
        reason: what they ask that a Trainer does not do, in a sentence.
        backends: on which they fail.
        only_cut: whether they fail only where batches are cut.
    """

    file: str
    tests: tuple
    reason: str
    backends: tuple = ALL
    only_cut: bool = False

    def concerns(self, *, backend, is_cut):
        """Whether tests that run like this fail."""
        return backend in self.backends and (is_cut or not self.only_cut)

    def find(self, name):
        """Return the pattern that names a test of the file, or `None`."""
        return next((p for p in self.tests if fnmatch(name, p)), None)


TRAINER = "trainers/trainer_test.py"
TENSORBOARD = "callbacks/tensorboard_test.py"

SPARSE = "Sparse arrays are refused, since windows stack samples."
RAGGED = "Ragged tensors are refused, since windows stack samples."
TRAIN_STEP = "A model that overrides train_step is refused."
STEPS_PER_EXECUTION = (
    "steps_per_execution is not heeded: callbacks are told of every update."
)
MORE_LOGS = (
    "The logs are compared whole, and a Trainer's also hold learning_rate, "
    "gradient_norm, loss_scale, updates and skipped_updates."
)
BARE_SCALAR = (
    "The loss is a scalar of which nobody says what it was averaged over, "
    "which is refused where an update has several micro-batches."
)
FORWARD_PASSES = (
    "A layer counts its forward passes; there is one per micro-batch."
)
AUTO_SCALE_LOSS = (
    "compile(auto_scale_loss=False) is not heeded: whether a Trainer scales "
    "the loss of float16 layers is said by its loss_scale."
)
OWN_SCALING = (
    "A Trainer scales the loss of float16 layers itself, and leaves the model "
    "compiled with the optimizer inside of Keras's LossScaleOptimizer."
)
COMPILED_LAYER = (
    "A layer calls TensorFlow, which JAX cannot compile; that is said by "
    "Trainer(jit_compile=False), not by compile(jit_compile=False)."
)
UNSYNCHRONIZED = (
    "It looks whether private values of variables are taken away while Keras "
    "trains; a Trainer leaves the variables as callbacks may read them."
)

PROCESSES = (
    "A PyDataset with use_multiprocessing is refused; Keras's test of it is "
    "run on PyTorch alone."
)

MAY_FAIL = [
    MayFail(file=TRAINER, tests=("test_*_sparse_*",), reason=SPARSE),
    MayFail(
        file=TRAINER,
        tests=("test_fit_with_data_adapter_py_dataset_multiprocessing*",),
        reason=PROCESSES,
        backends=("torch",),
    ),
    MayFail(
        file=TRAINER,
        tests=("test_trainer_with_raggeds_*",),
        reason=RAGGED,
        backends=("tensorflow",),
    ),
    MayFail(
        file=TRAINER,
        tests=(
            "test_evaluate_with_custom_test_step_*",
            "test_fit_with_custom_train_step",
            "test_retracing",
        ),
        reason=TRAIN_STEP,
    ),
    MayFail(
        file=TRAINER,
        tests=(
            "test_steps_per_execution_steps_count_*",
            "test_steps_per_execution_steps_per_epoch_*",
        ),
        reason=STEPS_PER_EXECUTION,
    ),
    MayFail(
        file=TRAINER,
        tests=("test_steps_per_execution_unrolled_*",),
        reason=STEPS_PER_EXECUTION,
        backends=("tensorflow",),
    ),
    MayFail(
        file=TRAINER,
        tests=("test_callback_methods_keys", "test_recompile"),
        reason=MORE_LOGS,
    ),
    MayFail(
        file="callbacks/csv_logger_test.py",
        tests=("test_CSVLogger",),
        reason=MORE_LOGS,
    ),
    MayFail(
        file="callbacks/remote_monitor_test.py",
        tests=("test_RemoteMonitorWithJsonPayload",),
        reason=MORE_LOGS,
    ),
    MayFail(
        file=TENSORBOARD,
        tests=(
            "test_TensorBoard_across_invocations",
            "test_TensorBoard_basic",
            "test_TensorBoard_batch_metrics",
            "test_TensorBoard_global_step",
            "test_TensorBoard_learning_rate_schedules",
            "test_TensorBoard_weight_*",
        ),
        reason=MORE_LOGS,
    ),
    MayFail(
        file=TENSORBOARD,
        tests=("test_custom_summary",),
        reason=MORE_LOGS,
        backends=("tensorflow", "torch"),
    ),
    MayFail(
        file=TENSORBOARD,
        tests=("test_custom_summary",),
        reason=COMPILED_LAYER,
        backends=("jax",),
    ),
    MayFail(
        file=TRAINER,
        tests=(
            "test_compute_loss_no_training_backwards_compatibility",
            "test_fwd_pass_loss_presence_in_compute_loss",
            "test_internal_only_loss",
            "test_metric_update_in_compute_loss",
        ),
        reason=BARE_SCALAR,
        only_cut=True,
    ),
    MayFail(
        file="callbacks/backup_and_restore_test.py",
        tests=("test_backup_corrupted", "test_best_case_*"),
        reason=FORWARD_PASSES,
        only_cut=True,
    ),
    MayFail(
        file=TRAINER,
        tests=("test_loss_scaling_prevents_underflow",),
        reason=AUTO_SCALE_LOSS,
    ),
    MayFail(
        file=TRAINER,
        tests=("test_adds_loss_scaling_optimizer",),
        reason=OWN_SCALING,
    ),
    MayFail(
        file=TRAINER,
        tests=("test_fit_eval_flow_for_jax_model_weights",),
        reason=UNSYNCHRONIZED,
        backends=("jax",),
    ),
]
