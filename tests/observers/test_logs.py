"""Claims about logs: fetched once, when somebody looks."""

import copy
import json
import pickle

import numpy as np
import pytest
from watching import Fetch

from accumtrainer.keras_api import ops
from accumtrainer.observers.logs import Logs

pytestmark = pytest.mark.any_backend


def as_keywords(**logs):
    return logs


@pytest.mark.parametrize(
    "look",
    [
        dict,
        lambda logs: {**logs},
        lambda logs: as_keywords(**logs),
        lambda logs: dict(logs.items()),
        lambda logs: dict(zip(logs.keys(), logs.values(), strict=True)),
        lambda logs: {name: logs[name] for name in logs},
        lambda logs: {name: logs.get(name) for name in reversed(logs)},
        lambda logs: json.loads(json.dumps(logs)),
        lambda logs: pickle.loads(pickle.dumps(logs)),
        lambda logs: logs.copy(),
        copy.copy,
        copy.deepcopy,
        lambda logs: logs | {},
        lambda logs: {} | logs,
        lambda logs: logs or {},
        lambda logs: eval(repr(logs)),
        lambda logs: eval(str(logs)),
        lambda logs: eval(f"{logs}"),
        lambda logs: {} if len(logs) != 2 else logs,
        lambda logs: {} if "loss" not in logs else logs,
        lambda logs: {} if logs.pop("new", 1) != 1 else logs,
        lambda logs: {} if logs.setdefault("loss", 9) == 9 else logs,
        lambda logs: dict([logs.popitem(), logs.popitem()]),
    ],
)
def test_looking_in_any_way_fetches_once(look):
    fetch = Fetch({"loss": np.float32(0.5), "accuracy": 0.75})
    looked = look(Logs(fetch))
    assert looked == {"loss": 0.5, "accuracy": 0.75}
    assert all(type(value) is float for value in looked.values())
    assert fetch.calls == 1


def test_updating_another_dict_fetches():
    other = {"epoch": 1}
    other.update(Logs(Fetch({"loss": 0.5})))
    assert other == {"epoch": 1, "loss": 0.5}


def test_comparison_fetches_both_sides():
    numbers = {"loss": 0.5}
    assert Logs(Fetch(numbers)) == numbers
    assert numbers == Logs(Fetch(numbers))
    assert Logs(Fetch(numbers)) == Logs(Fetch(numbers))
    assert not Logs(Fetch(numbers)) != numbers
    assert Logs(Fetch(numbers)) != Logs(Fetch({"loss": 0.25}))
    assert Logs(Fetch(numbers)) != Logs(Fetch({}))


def test_truth_is_whether_there_are_numbers():
    assert Logs(Fetch({"loss": 0.0}))
    assert not Logs(Fetch({}))
    assert not Logs()


def test_nobody_looking_never_fetches():
    fetch = Fetch({"loss": 0.5})
    logs = Logs(fetch, {"updates": 3})
    logs["lr"] = 0.1
    logs.update(epoch=1)
    logs |= {"best": 0.25}
    assert isinstance(logs, dict)
    assert fetch.calls == 0


def test_names_known_on_the_host_are_answered_without_fetching():
    fetch = Fetch({"loss": 0.5})
    logs = Logs(fetch, {"updates": 3})
    logs["lr"] = 0.1
    assert logs["updates"] == 3
    assert logs.get("lr") == 0.1
    assert "updates" in logs
    assert fetch.calls == 0


def test_what_was_written_survives_the_fetch():
    logs = Logs(Fetch({"loss": 0.5, "lr": 0.2}), {"updates": 3})
    logs["lr"] = 0.1
    assert logs["loss"] == 0.5
    assert list(logs.items()) == [("loss", 0.5), ("lr", 0.1), ("updates", 3)]


def test_fetched_logs_are_an_ordinary_dict():
    logs = Logs(Fetch({"loss": 0.5, "accuracy": 1.0}))
    del logs["accuracy"]
    logs["lr"] = 0.1
    assert logs.pop("loss") == 0.5
    assert logs == {"lr": 0.1}
    with pytest.raises(KeyError, match="loss"):
        logs["loss"]
    assert logs.get("loss", 7) == 7
    logs.clear()
    assert not logs


def test_clearing_unread_logs_forgets_what_would_be_fetched():
    fetch = Fetch({"loss": 0.5})
    logs = Logs(fetch)
    logs.clear()
    assert dict(logs) == {}
    assert fetch.calls == 0


def test_tensors_become_python_numbers_or_arrays():
    logs = Logs(
        lambda: {
            "loss": ops.convert_to_tensor(0.5, "float32"),
            "half": ops.convert_to_tensor(0.5, "bfloat16"),
            "count": ops.convert_to_tensor(3, "int32"),
            "applied": True,
            "confusion": ops.eye(2),
            "note": "warm-up",
        }
    )
    assert type(logs["loss"]) is float
    assert type(logs["half"]) is float
    assert type(logs["count"]) is int
    assert logs["applied"] is True
    assert isinstance(logs["confusion"], np.ndarray)
    assert logs["note"] == "warm-up"


def test_a_fetch_that_fails_may_be_tried_again():
    answers = [{"loss": 0.5}]

    def fetch():
        if len(answers) == 1:
            answers.append(None)
            raise OSError("device lost")
        return answers[0]

    logs = Logs(fetch, {"updates": 3})
    with pytest.raises(OSError, match="device lost"):
        dict(logs)
    assert dict(logs) == {"loss": 0.5, "updates": 3}


# --- Who is a callback ---


def test_lazy_copy_of_logs_fetches_for_itself():
    fetched = []
    logs = Logs(lambda: fetched.append(1) or {"loss": 0.5})
    logs["mine"] = 3
    copy = logs.lazy_copy()
    assert not fetched
    assert dict(copy) == {"loss": 0.5, "mine": 3} and len(fetched) == 1
    copy["more"] = 4
    assert dict(logs) == {"loss": 0.5, "mine": 3} and len(fetched) == 2
