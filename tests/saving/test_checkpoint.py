"""Claims about snapshots on disk: whole or not at all, and checked."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumtrainer import (
    CheckpointDirectory,
    CheckpointError,
    Score,
    Snapshot,
)
from accumtrainer.data.batches import Batch
from accumtrainer.saving.checkpoint import (
    ARRAYS,
    MANIFEST,
    STATE,
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from accumtrainer.saving.snapshot import blank, decode, encode

pytestmark = pytest.mark.usefixtures("without_xla")


def make_snapshot(updates=3, value=1.0):
    return Snapshot(
        variables={
            "model": {"dense/kernel": np.full([4, 3], value, "float32")}
        },
        progress={"updates": updates},
        position={"epoch": 1, "carried": [np.arange(3)]},
        source={},
        run={"best": float("inf")},
        callbacks={"EarlyStopping-0": {"wait": 2}},
        about={"backend": "tensorflow"},
    )


def kernel_of(snapshot):
    return snapshot.variables["model"]["dense/kernel"]


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["array", "text", "tuple", "float", "dict"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


@given(plain_values)
def test_plain_values_survive_json(value):
    arrays = {}
    written = json.dumps(encode(value, arrays, "x"), allow_nan=False)
    assert decode(json.loads(written), arrays) == value


def test_arrays_batches_and_blanks_survive_with_their_dtypes():
    batch = Batch(np.zeros([2, 3], "float16"), {"a": np.ones([2], "int64")})
    arrays = {}
    written = encode([batch, blank(batch), float("nan")], arrays, "x")
    again, empty, nan = decode(json.loads(json.dumps(written)), arrays)
    assert isinstance(again, Batch) and again.sample_weight is None
    assert again.x.dtype == "float16" and again.y["a"].tolist() == [1, 1]
    assert empty.x.shape == (2, 3) and not empty.y["a"].any()
    assert np.isnan(nan)


@pytest.mark.parametrize(
    "text",
    [
        np.array([["no", "no, no"], ["", "é"]]),
        np.array([["no", "no, no"], ["", "é"]], object),
        np.array([b"no", b"\xff\x00no"], "S5"),
        np.array(["no", b"\xff\x00"], object),
        np.zeros([0, 2], "U3"),
    ],
    ids=["text", "objects", "bytes", "both", "empty"],
)
def test_arrays_of_text_survive_a_checkpoint(tmp_path, text):
    snapshot = dataclasses.replace(
        make_snapshot(), position={"carried": [Batch(text)]}
    )
    write_checkpoint(tmp_path / "a", snapshot)
    (batch,) = read_checkpoint(tmp_path / "a").position["carried"]
    assert batch.x.dtype == text.dtype and batch.x.shape == text.shape
    assert batch.x.tolist() == text.tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array([1 + 2j, 3]),
        np.array(["2020-01-01", "NaT"], "datetime64[D]"),
        np.array([(1.0, 2)], [("a", "f4"), ("b", "i8")]),
        np.ones(2, np.longdouble),
        np.arange(3, dtype=">f4"),
        np.array(1.5),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_every_dtype_survive_a_checkpoint(tmp_path, array):
    callbacks = {"Keeps-0": {"array": array}}
    snapshot = dataclasses.replace(make_snapshot(), callbacks=callbacks)
    write_checkpoint(tmp_path / "a", snapshot)
    again = read_checkpoint(tmp_path / "a").callbacks["Keeps-0"]["array"]
    assert again.dtype == array.dtype and again.shape == array.shape
    np.testing.assert_array_equal(again, array)


def test_arrays_whose_places_read_alike_stay_apart():
    arrays = {}
    value = {"a": {"b": np.ones(2)}, "a/b": np.zeros(2)}
    again = decode(encode(value, arrays, "x"), arrays)
    np.testing.assert_equal(again, value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda: None, "function"), (np.array([{1}, "no"], object), "ndarray")],
)
def test_what_cannot_be_saved_is_refused_by_name(value, kind):
    with pytest.raises(TypeError, match=f"x/hook of type {kind}"):
        encode({"hook": value}, {}, "x")


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    write_checkpoint(tmp_path / "a", make_snapshot())
    again = read_checkpoint(tmp_path / "a")
    assert kernel_of(again).tolist() == kernel_of(make_snapshot()).tolist()
    assert again.run == {"best": float("inf")}
    assert again.position["carried"][0].tolist() == [0, 1, 2]
    assert again.callbacks == {"EarlyStopping-0": {"wait": 2}}


def test_variables_come_back_in_their_order(tmp_path):
    names = [f"layer_{i}/kernel" for i in range(25)]
    snapshot = make_snapshot()
    snapshot.variables["model"] = {
        n: np.zeros([i]) for i, n in enumerate(names)
    }
    write_checkpoint(tmp_path / "a", snapshot)
    assert list(read_checkpoint(tmp_path / "a").variables["model"]) == names


def test_nothing_but_the_checkpoint_is_left_behind(tmp_path):
    for _ in range(2):  # The second replaces the first.
        write_checkpoint(tmp_path / "a", make_snapshot())
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == [ARRAYS, MANIFEST, STATE]


def test_a_directory_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds something else"):
        write_checkpoint(tmp_path, make_snapshot())
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


def write_foreign(file):
    file.write_text('{"content": {"format": "other"}, "xxh3_128": ""}')


DAMAGES = [os.remove, flip_bit, truncate, write_foreign]


@pytest.mark.parametrize("name", [ARRAYS, MANIFEST, STATE])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_recognised_and_the_previous_one_is_used(
    tmp_path, damage, name
):
    directory = CheckpointDirectory(tmp_path)
    directory.write(make_snapshot(updates=1))
    newest = directory.write(make_snapshot(updates=2))
    damage(newest / name)
    with pytest.warns(UserWarning, match=f"{newest.name} cannot be used"):
        assert directory.newest().progress["updates"] == 1


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    write_checkpoint(
        tmp_path / "a",
        make_snapshot(),
        Score(name="loss", value=0.5, mode="min"),
    )
    file = tmp_path / "a" / MANIFEST
    whole = file.read_bytes()
    before = json.loads(whole)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        try:
            read_checkpoint(tmp_path / "a")
        except CheckpointError:
            continue
        assert json.loads(damaged) == before  # It was a space.


def test_an_error_says_so_if_no_checkpoint_is_good(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    for updates in (1, 2):
        flip_bit(directory.write(make_snapshot(updates)) / ARRAYS)
    with pytest.raises(CheckpointError, match="all 2 are damaged or foreign"):
        directory.newest()


def test_a_directory_without_checkpoints_has_no_newest(tmp_path):
    (tmp_path / "notes").mkdir()
    assert CheckpointDirectory(tmp_path).newest() is None
    assert CheckpointDirectory(tmp_path / "missing").newest() is None
    with pytest.raises(CheckpointError, match="which has none"):
        find_checkpoint(tmp_path)


def test_the_newest_are_kept_and_the_best(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=2, keep_best=True)
    for updates, value in enumerate((0.9, 0.1, 0.5, 0.4, 0.3), start=1):
        score = Score(name="val_loss", value=value, mode="min")
        directory.write(make_snapshot(updates), score)
    kept = [name.split("-")[-1].lstrip("0") for name in directory.names()]
    assert kept == ["2", "4", "5"]
    assert directory.best().progress["updates"] == 2
    assert directory.newest().progress["updates"] == 5
    assert find_checkpoint(tmp_path, "best").progress["updates"] == 2


def test_the_newest_can_be_given_a_score_later(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=1, keep_best=True)
    old, new = (Score(name="loss", value=v, mode="min") for v in (0.5, 0.4))
    directory.write(make_snapshot(1), old)
    directory.write(make_snapshot(2))
    assert directory.best().progress["updates"] == 1
    directory.rate(new)
    assert directory.best().progress["updates"] == 2
    (name,) = os.listdir(tmp_path)
    assert sorted(os.listdir(tmp_path / name)) == [ARRAYS, MANIFEST, STATE]


def test_the_best_may_be_the_largest_and_is_never_nan(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=9, keep_best=True)
    for updates, value in enumerate((0.2, float("nan"), 0.8, 0.5), start=1):
        score = Score(name="accuracy", value=value, mode="max")
        directory.write(make_snapshot(updates), score)
    assert directory.best().progress["updates"] == 3


def test_best_without_scores_is_refused(tmp_path):
    CheckpointDirectory(tmp_path).write(make_snapshot())
    with pytest.raises(CheckpointError, match="keep_best"):
        find_checkpoint(tmp_path, "best")


def test_damaged_checkpoints_do_not_crowd_out_good_ones(tmp_path):
    directory = CheckpointDirectory(tmp_path, keep=3)
    for updates in (1, 2, 3):
        path = directory.write(make_snapshot(updates))
    flip_bit(path / STATE)
    again = CheckpointDirectory(tmp_path, keep=2)
    with pytest.warns(UserWarning, match="is skipped"):
        again.newest()
    again.write(make_snapshot(4))
    kept = [name.split("-")[-1].lstrip("0") for name in again.names()]
    assert kept == ["2", "4"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    path = directory.write(make_snapshot())
    shutil.copytree(path, tmp_path / ".unfinished-000001-update-00000009-77")
    directory.clean()
    assert os.listdir(tmp_path) == [path.name]


def test_a_checkpoint_cut_off_while_it_is_replaced_is_found(tmp_path):
    write_checkpoint(tmp_path / "a", make_snapshot(7))
    (tmp_path / "a").rename(tmp_path / "a.replaced")
    assert find_checkpoint(tmp_path / "a").progress["updates"] == 7


def test_a_full_disk_leaves_older_checkpoints_as_they_were(
    tmp_path, monkeypatch
):
    directory = CheckpointDirectory(tmp_path)
    directory.write(make_snapshot(1))

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        directory.write(make_snapshot(2))
    assert len(os.listdir(tmp_path)) == 1
    assert directory.newest().progress["updates"] == 1


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        CheckpointDirectory(tmp_path / "file" / "runs").write(make_snapshot())


def test_best_is_of_the_number_that_counts_by_now(tmp_path):
    snapshot = make_snapshot()
    directory = CheckpointDirectory(tmp_path, keep=3, keep_best=True)
    scores = [("accuracy", 0.9, "max"), ("loss", 0.5, "min")]
    scores += [("loss", 0.4, "min"), ("loss", 0.7, "min")]
    for name, value, mode in scores:
        directory.write(snapshot, Score(name=name, value=value, mode=mode))
    assert directory.best_path().name.startswith("000002")
