"""Claims about the frozen option values."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumtrainer.config import Accumulation, Every, LossScale
from accumtrainer.progress import Progress


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of steps and micro_batch_size"),
        (
            {"steps": 2, "micro_batch_size": 2},
            ValueError,
            "exactly one of steps and micro_batch_size",
        ),
        ({"steps": 0}, ValueError, "Received: steps=0"),
        ({"steps": -3}, ValueError, "Received: steps=-3"),
        ({"steps": 2.5}, TypeError, "Received: steps=2.5"),
        ({"steps": 2.0}, TypeError, "Received: steps=2.0"),
        ({"steps": True}, TypeError, "Received: steps=True"),
        ({"steps": "8"}, TypeError, "Received: steps='8'"),
        ({"steps": {}}, ValueError, "Add the key 0"),
        ({"steps": {1: 2}}, ValueError, "Add the key 0"),
        ({"steps": {0: 2, -1: 2}}, ValueError, "first epoch in steps"),
        ({"steps": {0: 2, 1.5: 2}}, TypeError, "first epoch in steps"),
        ({"steps": {0: 2, 3: 0}}, ValueError, r"steps\[3\]=0"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0"),
        ({"micro_batch_size": 1.5}, TypeError, "micro_batch_size=1.5"),
        ({"micro_batch_size": True}, TypeError, "micro_batch_size=True"),
        ({"micro_batch_size": "most"}, TypeError, "or 'auto' for as many"),
        (
            {"micro_batch_size": 4, "memory_limit_bytes": 2**30},
            ValueError,
            "must come with micro_batch_size='auto'",
        ),
        (
            {"micro_batch_size": "auto", "memory_limit_bytes": 0},
            ValueError,
            "memory_limit_bytes must be",
        ),
        (
            {"micro_batch_size": 8, "tail": "drop"},
            ValueError,
            "tail must be left out",
        ),
        ({"steps": 2, "tail": "keep"}, ValueError, "'flush', 'carry', 'drop'"),
        (
            {"steps": 2, "combine": "average"},
            ValueError,
            "'exact', 'mean', 'sum'",
        ),
    ],
)
def test_accumulation_refuses_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Accumulation(**arguments)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [(Accumulation, r"Accumulation\(steps=4\)"), (LossScale, "initial=4")],
)
def test_options_without_a_name_are_refused_with_what_to_write(make, remedy):
    with pytest.raises(TypeError, match=f"by name. Received: 4. .*{remedy}"):
        make(4)


def test_accumulation_is_frozen_and_keeps_a_copy_of_its_schedule():
    schedule = {4: 2, 0: 1}
    accumulation = Accumulation(steps=schedule)
    schedule[0] = 9
    assert accumulation.steps_at(epoch=0, updates=0) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        accumulation.steps = 3


def test_accumulation_of_a_number_means_steps():
    assert Accumulation.of(8) == Accumulation(steps=8)


def test_accumulation_of_an_accumulation_is_that_object():
    accumulation = Accumulation(micro_batch_size=4)
    assert Accumulation.of(accumulation) is accumulation


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2.5, TypeError),
        (True, TypeError),
        ("8", TypeError),
        (None, TypeError),
        ({0: 2}, TypeError),
    ],
)
def test_accumulation_of_anything_else_names_the_argument(value, error):
    with pytest.raises(error, match=r"accumulation must .* Received"):
        Accumulation.of(value)


def test_steps_follow_the_epoch_in_a_dict():
    accumulation = Accumulation(steps={5: 8, 0: 1, 2: 4})
    steps = [accumulation.steps_at(epoch, 0) for epoch in range(7)]
    assert steps == [1, 1, 4, 4, 4, 8, 8]


def test_steps_follow_the_updates_in_a_function():
    accumulation = Accumulation(steps=lambda updates: 1 + updates // 10)
    assert accumulation.steps_at(epoch=3, updates=25) == 3


@pytest.mark.parametrize(
    ("returned", "error"),
    [(0, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)],
)
def test_steps_function_that_returns_no_count_is_refused(returned, error):
    accumulation = Accumulation(steps=lambda updates: returned)
    with pytest.raises(error, match=r"steps\(7\) must be a whole number"):
        accumulation.steps_at(epoch=0, updates=7)


def test_micro_batches_make_one_window_of_one_loader_batch():
    assert Accumulation(micro_batch_size=4).steps_at(3, 100) == 1


def _simulated_updates(accumulation, batches, epochs):
    """Count updates by going through the batches one by one."""
    made, pending = 0, 0
    for epoch in range(epochs):
        # A tail carried over is asked again under its new epoch.
        arriving, pending = pending + batches, 0
        for _ in range(arriving):
            pending += 1
            if pending >= accumulation.steps_at(epoch, made):
                made, pending = made + 1, 0
        if pending and accumulation.tail == "flush":
            made += 1
        if accumulation.tail != "carry":
            pending = 0
    return made + bool(pending)


@given(
    steps=st.one_of(
        st.integers(1, 9),
        st.dictionaries(st.integers(1, 4), st.integers(1, 9)).map(
            lambda later: {0: 3} | later
        ),
        st.sampled_from([lambda made: 1 + made % 4, lambda made: 1 + made]),
    ),
    tail=st.sampled_from(["flush", "carry", "drop"]),
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 8),
    epochs=st.integers(1, 5),
)
def test_updates_equal_a_simulation(steps, tail, samples, batch_size, epochs):
    accumulation = Accumulation(steps=steps, tail=tail)
    updates = accumulation.updates(
        samples=samples, batch_size=batch_size, epochs=epochs
    )
    batches = -(-samples // batch_size)
    assert updates == _simulated_updates(accumulation, batches, epochs)


def test_updates_of_micro_batches_are_loader_batches():
    accumulation = Accumulation(micro_batch_size=4)
    assert accumulation.updates(samples=50, batch_size=16, epochs=3) == 12


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("samples", 0, ValueError),
        ("batch_size", 2.0, TypeError),
        ("epochs", 0, ValueError),
    ],
)
def test_updates_refuses_bad_sizes(name, value, error):
    sizes = {"samples": 10, "batch_size": 2, "epochs": 1} | {name: value}
    with pytest.raises(error, match=f"{name} must be .* Received: {name}="):
        Accumulation(steps=2).updates(**sizes)


def test_loss_scale_defaults_are_what_the_readme_says():
    scale = LossScale()
    assert dataclasses.astuple(scale) == (2.0**15, 2000, 2.0, 1.0, 2.0**24)


def test_loss_scale_turns_numbers_into_floats():
    assert isinstance(LossScale(initial=2**15).initial, float)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial": 0}, ValueError, "initial must be"),
        ({"initial": float("nan")}, ValueError, "initial must be"),
        ({"maximum": float("inf")}, ValueError, "maximum must be"),
        ({"minimum": -1.0}, ValueError, "minimum must be"),
        ({"initial": "big"}, TypeError, "initial must be"),
        ({"initial": True}, TypeError, "initial must be"),
        ({"factor": 1}, ValueError, "factor must be"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be"),
        ({"growth_interval": 2.5}, TypeError, "growth_interval must be"),
        ({"initial": 0.5}, ValueError, "between minimum and maximum"),
        ({"initial": 2.0**25}, ValueError, "between minimum and maximum"),
    ],
)
def test_loss_scale_refuses_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScale(**arguments)


@pytest.mark.parametrize(
    ("n", "unit", "error", "message"),
    [
        (0, "updates", ValueError, "n must be"),
        (2.5, "updates", TypeError, "n must be"),
        (True, "epochs", TypeError, "n must be"),
        (0.0, "seconds", ValueError, "n must be"),
        (float("inf"), "seconds", ValueError, "n must be"),
        ("1", "seconds", TypeError, "n must be"),
        (1, "steps", ValueError, "'updates', 'epochs', 'micro_batches'"),
    ],
)
def test_every_refuses_bad_arguments(n, unit, error, message):
    with pytest.raises(error, match=message):
        Every(n, unit)


def test_every_takes_fractions_of_seconds():
    every = Every(0.5, "seconds")
    assert every.is_due(Progress(seconds=0.4), Progress(seconds=0.6))
    assert not every.is_due(Progress(seconds=0.6), Progress(seconds=0.9))


@pytest.mark.parametrize(
    "unit", ["updates", "epochs", "micro_batches", "samples", "seconds"]
)
def test_every_reads_the_clock_it_names(unit):
    every = Every(10, unit)
    assert every.is_due(Progress(), Progress(**{unit: 10}))
    assert not every.is_due(Progress(**{unit: 10}), Progress(**{unit: 19}))
    assert every.least_updates(Progress()) == (10 if unit == "updates" else 1)


@given(n=st.integers(1, 20), updates=st.integers(0, 100))
def test_no_occasion_comes_before_the_least_updates(n, updates):
    every, before = Every(n, "updates"), Progress(updates=updates)
    least = every.least_updates(before)
    is_due = [
        every.is_due(before, Progress(updates=updates + more))
        for more in range(1, least + 1)
    ]
    assert is_due == [False] * (least - 1) + [True]


@given(
    n=st.integers(1, 20),
    strides=st.lists(st.integers(0, 50), min_size=1, max_size=30),
)
def test_every_is_due_once_for_each_stride_over_a_multiple(n, strides):
    every, before = Every(n, "samples"), Progress()
    for stride in strides:
        after = Progress(samples=before.samples + stride)
        crossed = range(before.samples + 1, after.samples + 1)
        assert every.is_due(before, after) == any(
            sample % n == 0 for sample in crossed
        )
        before = after


@pytest.mark.parametrize(
    "options",
    [
        Accumulation(steps=4, tail="carry", combine="sum"),
        Accumulation(steps={5: 8, 0: 2}),
        Accumulation(steps={0: np.int64(2)}),
        Accumulation(steps=np.int64(4)),
        LossScale(initial=np.float32(8)),
        Accumulation(micro_batch_size=16, per_example=True),
        Accumulation(micro_batch_size="auto", memory_limit_bytes=2**30),
        LossScale(initial=64, growth_interval=7, maximum=128),
        Every(100, "updates"),
        Every(0.5, "seconds"),
    ],
)
def test_options_come_back_from_json(options):
    plain = json.loads(json.dumps(options.to_dict()))
    assert type(options).from_dict(plain) == options


def test_keys_of_inner_dicts_are_text_as_in_json():
    assert Accumulation(steps={0: 2}).to_dict()["steps"] == {"0": 2}


def test_options_left_out_of_a_dict_have_their_defaults():
    assert Accumulation.from_dict({"steps": 4}) == Accumulation(steps=4)
    assert LossScale.from_dict({}) == LossScale()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Accumulation.from_dict({"steps": 2, "size": 3}),
            ValueError,
            "Received: size. It has steps",
        ),
        (
            lambda: Accumulation.from_dict({"steps": 0}),
            ValueError,
            "Received: steps=0",
        ),
        (
            lambda: Every.from_dict([3, "updates"]),
            TypeError,
            "must get a dict of options. Received: \\[3",
        ),
        (
            lambda: Accumulation(steps=lambda updates: 2).to_dict(),
            ValueError,
            "steps must be a plain value",
        ),
    ],
)
def test_dicts_that_are_no_options_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
