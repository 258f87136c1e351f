"""Which tests Keras Core is held to, so that they take a minute or two.

Of the files below the tests named run, the first and the last case of each;
of other files all. They are divided among the backends. What Keras Core lacks
is skipped with the reason, see `keras_core_gaps.py`.
"""

import os

import pytest
from divided import leave_to_others, test_of

CONTRACT = {
    "test_exactness": (
        "test_window_equals_its_big_batch",
        "test_class_weights_count_as_in_the_big_batch",
        "test_window_under_xla_equals_its_big_batch",
        "test_micro_batch_of_padding_alone_counts_nothing",
        "test_mean_and_sum_are_the_plain_loops",
    ),
    "test_exactness_losses": (
        "test_every_loss_equals_its_big_batch",
        "test_ignored_class_and_mask_count_together",
        "test_scalar_loss_with_denominator_is_exact",
        "test_model_with_its_own_compute_loss_is_exact",
        "test_weighted_loss_of_a_hook_is_exact",
    ),
    "test_exactness_outputs": (
        "test_outputs_of_different_denominators_are_exact",
        "test_outputs_with_weights_of_their_own_are_exact",
        "test_weight_regularizers_count_once_per_window",
        "test_activity_regularizers_are_means_over_samples",
        "test_scalar_given_to_add_loss_is_weighed_as_stated",
    ),
    "test_exactness_optimizers": (
        "test_updates_of_every_optimizer_are_exact",
        "test_optimizer_settings_act_once_per_window",
        "test_repeated_words_are_updated_as_by_dense_gradients",
    ),
    "test_exactness_fit": (
        "test_without_accumulation_weights_are_those_of_keras_fit",
    ),
    "test_schedules": (
        "test_schedule_is_asked_once_per_update",
        "test_rates_in_the_logs_are_those_that_moved_the_weights",
        "test_slices_of_a_loader_batch_do_not_move_the_schedule",
        "test_schedules_of_keras_are_given_the_updates_made",
        "test_learning_rate_scheduler_sets_the_rate_of_an_epoch",
        "test_iterations_count_updates",
        "test_weight_decay_acts_once_per_update",
        "test_second_fit_goes_on_with_the_schedule",
    ),
    "test_loss_scaling": (
        "test_small_gradients_survive_float16",
        "test_overflow_of_float16_halves_the_scale_until_windows_are_finite",
        "test_scale_grows_after_its_interval_of_updates_up_to_its_ceiling",
        "test_compiled_float16_model_just_works",
        "test_settings_of_a_loss_scale_optimizer_are_carried_over",
    ),
    "test_bad_windows": (
        "test_window_with_a_bad_micro_batch_leaves_everything_unchanged",
        "test_metrics_forget_a_bad_window",
    ),
    "test_hooks": (
        "test_step_equals_the_plain_loop_it_stands_for",
        "test_after_apply_keeps_a_moving_average_of_the_weights",
        "test_own_loss_is_the_loss_of_validation_too",
    ),
    "test_hook_state": (
        "test_random_numbers_are_the_same_for_the_same_seed",
        "test_skipped_window_undoes_what_hooks_did_to_tracked_state",
    ),
    "test_hook_logs": ("test_logged_values_are_reduced_over_the_window",),
    "test_hook_order": (
        "test_hooks_are_traced_and_callbacks_called_in_the_order_written",
    ),
    "test_stock_callbacks": (
        "test_batch_of_a_stock_callback_is_one_update",
        "test_stock_callback_sees_running_means_as_in_keras",
        "test_early_stopping_restores_the_best_weights",
        "test_model_checkpoint_saves_every_epoch",
        "test_csv_logger_writes_a_row_per_epoch",
        "test_reduce_lr_on_plateau_reduces_the_applied_rate",
        "test_terminate_on_nan_stops_at_the_first_bad_loss",
    ),
}


def pytest_collection_modifyitems(config, items):
    """Keep the contract; refuse to run where a test it names is gone."""
    if config.option.keyword or any("::" in name for name in config.args):
        return  # Somebody has chosen other tests by name.
    cases = {}
    for item in items:
        test = (item.path.stem, getattr(item, "originalname", item.name))
        cases.setdefault(test, []).append(item)
    for file in {file for file, _ in cases} & set(CONTRACT):
        gone = [name for name in CONTRACT[file] if (file, name) not in cases]
        if gone:
            raise pytest.UsageError(
                f"The contract must name tests of {file}.py. Received: {gone}. "
                "Rename them in keras_core_contract.py as well."
            )
    kept = set()
    for (file, name), some in cases.items():
        if file not in CONTRACT:
            kept.update(map(id, some))
        elif name in CONTRACT[file]:
            kept.update(map(id, (some[0], some[-1])))
    left_out = [item for item in items if id(item) not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if id(item) in kept]
    backend = os.environ["KERAS_BACKEND"]
    leave_to_others(config, items, lambda item: test_of(item.nodeid), backend)
