"""Snapshots on disk: written whole or not at all, checked when read.

A checkpoint is a directory of three files: the arrays in safetensors, the
rest in JSON, and a manifest with the size and the checksum of both. It is
written under another name, flushed to the disk, and renamed.
"""

import dataclasses
import json
import math
import mmap
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.numpy
import xxhash

from accumtrainer import errors
from accumtrainer.saving.snapshot import Snapshot, decode, encode

FORMAT = "accumtrainer checkpoint"
VERSION = 1
MANIFEST, STATE, ARRAYS = "manifest.json", "state.json", "arrays.safetensors"
UNFINISHED = ".unfinished-"

NAME = re.compile(r"(?P<number>\d{6,})-update-(?P<updates>\d+)")


def write_checkpoint(
    path: str | os.PathLike, snapshot: Snapshot, score: "Score | None" = None
) -> None:
    """Write one checkpoint, replacing the one that may be there.

    Args:
        path: where the directory shall be.
        score: `Score` by which checkpoints are compared, or `None`.

    Raises:
        OSError: the disk does not take it; what was there is still there.
        CheckpointError: there is something else at `path`.
    """
    path = Path(path)
    if path.exists() and not is_checkpoint(path) and not _is_empty(path):
        raise errors.CheckpointError(errors.NOT_OURS.format(path=path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{UNFINISHED}{path.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _write_files(unfinished, snapshot, score)
        replaced = _replaced(path)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        unfinished.rename(path)
        _flush(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_files(
    directory: Path, snapshot: Snapshot, score: "Score | None"
) -> None:
    plain, arrays = snapshot.pack()
    try:
        safetensors.numpy.save_file(arrays, directory / ARRAYS)
    except safetensors.SafetensorError as error:
        raise OSError(f"{ARRAYS} could not be written: {error}") from error
    _write_json(directory / STATE, plain)
    _flush(directory / ARRAYS)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "updates": snapshot.progress["updates"],
        "score": _encode_score(score),
        "files": {
            name: {
                "bytes": (directory / name).stat().st_size,
                "xxh3_128": _checksum(directory / name),
            }
            for name in (STATE, ARRAYS)
        },
    }
    _write_manifest(directory / MANIFEST, content)
    _flush(directory)


def _encode_score(score: "Score | None") -> Any:
    return encode(score and dataclasses.asdict(score), {}, "score")


def _write_manifest(path: Path, content: dict[str, Any]) -> None:
    signed = {"content": content, "xxh3_128": _json_checksum(content)}
    _write_json(path, signed)


def _replace_score(path: Path, score: "Score") -> None:
    """Give a checkpoint another score, at once or not at all."""
    content = _read_manifest(path) | {"score": _encode_score(score)}
    unfinished = path / f"{UNFINISHED}{MANIFEST}"
    _write_manifest(unfinished, content)
    unfinished.replace(path / MANIFEST)
    _flush(path)


def _replaced(path: Path) -> Path:
    """Name the place where a checkpoint waits until its successor is there."""
    return path.with_name(f"{path.name}.replaced")


def _json_checksum(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    """Have the system write a file or directory to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    if not path.stat().st_size:
        return ""  # Nothing cannot be mapped into memory.
    with path.open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128_hexdigest(content)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Say whether a directory looks like a checkpoint, good or not."""
    return (Path(path) / MANIFEST).is_file()


def read_checkpoint(path: str | os.PathLike) -> Snapshot:
    """Read one checkpoint, after checking that it is whole.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointError: it is missing, damaged, or not one of ours.
    """
    path = Path(path)
    try:
        manifest = _read_manifest(path)
        for name, expected in manifest["files"].items():
            _check_file(path / name, expected)
        plain = json.loads((path / STATE).read_text(encoding="utf-8"))
        arrays = safetensors.numpy.load_file(path / ARRAYS)
        return Snapshot.unpack(plain, arrays)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        safetensors.SafetensorError,
    ) as error:
        raise errors.CheckpointError(
            errors.UNREADABLE_CHECKPOINT.format(path=path, reason=error)
        ) from error


def _read_manifest(path: Path) -> dict[str, Any]:
    signed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest = signed["content"]
    if _json_checksum(manifest) != signed["xxh3_128"]:
        raise ValueError(f"{MANIFEST} does not match its checksum")
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise ValueError(
            f"{MANIFEST} names the format {manifest['format']!r}, version "
            f"{manifest['version']!r}, not {FORMAT!r}, version {VERSION}"
        )
    if set(manifest["files"]) != {STATE, ARRAYS}:
        raise ValueError(f"{MANIFEST} lists other files")
    return manifest


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(
            f"{path.name} has {size} bytes instead of {expected['bytes']}"
        )
    if _checksum(path) != expected["xxh3_128"]:
        raise ValueError(f"{path.name} does not match its checksum")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How good a checkpoint is.

    Args:
        name: of the number, for example `"val_loss"`.
        value: the number.
        mode: `"min"` or `"max"`: which numbers are good.

    Examples:
        >>> old, new = (Score(name="loss", value=v, mode="min") for v in (2, 1))
        >>> new.is_better_than(old)
        True
    """

    name: str
    value: float
    mode: Literal["min", "max"]

    def is_better_than(self, other: "Score") -> bool:
        """Say whether this one is better than another; NaN never is."""
        return self.key < other.key

    @property
    def key(self) -> float:
        """A float that is lower for the better score."""
        key = -self.value if self.mode == "max" else self.value
        return math.inf if math.isnan(key) else key


class CheckpointDirectory:
    """The checkpoints of one run, the newest few and the best.

    Args:
        path: the directory; made when the first checkpoint is written.
        keep: how many of the newest to keep, at least 1.
        keep_best: whether to keep the one with the best score too.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     CheckpointDirectory(folder).newest() is None
        True
    """

    def __init__(
        self, path: str | os.PathLike, *, keep: int = 3, keep_best: bool = False
    ):
        self.path = Path(path)
        self._keep = keep
        self._keep_best = keep_best
        self._damaged: set[str] = set()

    def names(self) -> list[str]:
        """List the names of the checkpoints, good or not, oldest first."""
        if not self.path.is_dir():
            return []
        names = [p.name for p in self.path.iterdir() if p.is_dir()]
        return sorted(filter(NAME.fullmatch, names), key=_number)

    def newest(self) -> Snapshot | None:
        """Read the newest good checkpoint.

        Returns:
            `Snapshot`, or `None` where there is no checkpoint at all.

        Raises:
            CheckpointError: there are some, and none of them is good.
        """
        return self._first_good(reversed(self.names()))

    def best(self) -> Snapshot | None:
        """Read the good checkpoint with the best score; see `newest`."""
        names = self._by_score()
        if not names and self.names():
            raise errors.CheckpointError(
                errors.NO_SCORES.format(path=self.path)
            )
        return self._first_good(names)

    def best_path(self) -> Path | None:
        """Find the checkpoint with the best score; `None` where none has one.

        It is not read, so it may be damaged.
        """
        names = self._by_score()
        return self.path / names[0] if names else None

    def write(self, snapshot: Snapshot, score: Score | None = None) -> Path:
        """Write a checkpoint, then remove those that are not to be kept.

        Args:
            score: `Score` by which checkpoints are compared, or `None`.

        Returns:
            `Path` of the checkpoint.
        """
        names = self.names()
        number = _number(names[-1]) + 1 if names else 0
        path = self.path / (
            f"{number:06d}-update-{snapshot.progress['updates']:08d}"
        )
        write_checkpoint(path, snapshot, score)
        self._remove_old()
        return path

    def rate(self, score: Score) -> None:
        """Give the newest checkpoint a score that it was written without.

        Those that are not to be kept by it are removed.
        """
        _replace_score(self.path / self.names()[-1], score)
        self._remove_old()

    def clean(self) -> None:
        """Remove what was left unfinished by a process that was killed."""
        if self.path.is_dir():
            for path in self.path.glob(f"{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _first_good(self, names: Iterable[str]) -> Snapshot | None:
        failures = []
        for name in names:
            try:
                snapshot = read_checkpoint(self.path / name)
            except errors.CheckpointError as error:
                failures.append(error)
                self._damaged.add(name)
            else:
                for failure in failures:
                    warnings.warn(f"{failure} It is skipped.", stacklevel=2)
                return snapshot
        if failures:
            raise errors.CheckpointError(
                errors.NO_GOOD_CHECKPOINT.format(
                    path=self.path, count=len(failures)
                )
            ) from failures[0]
        return None

    def _by_score(self) -> list[str]:
        """List the names of those that have a score, best first.

        They are compared by what the newest of them was judged by.
        """
        scores: dict[str, float] = {}
        judged: tuple[str, str] | None = None
        for name in reversed(self.names()):
            try:
                score = _read_manifest(self.path / name)["score"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if score is None:
                continue
            score = Score(**decode(score, {}))
            judged = judged or (score.name, score.mode)
            if judged == (score.name, score.mode):
                scores[name] = score.key
        return sorted(scores, key=scores.__getitem__)

    def _remove_old(self) -> None:
        names = self.names()
        good = [name for name in names if name not in self._damaged]
        kept = set(good[-self._keep :])
        if self._keep_best:
            kept.update(self._by_score()[:1])
        for name in names:
            if name not in kept:
                doomed = self.path / f"{UNFINISHED}{name}"
                (self.path / name).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def find_checkpoint(path: str | os.PathLike, which: str = "latest") -> Snapshot:
    """Read a checkpoint from its own directory or from a run's.

    Args:
        path: directory of one checkpoint, or of many.
        which: `"latest"` or `"best"`, where there are many.

    Raises:
        CheckpointError: there is none that is good.
    """
    path = Path(path)
    for place in (path, _replaced(path)):
        if is_checkpoint(place):
            return read_checkpoint(place)
    directory = CheckpointDirectory(path)
    found = directory.best() if which == "best" else directory.newest()
    if found is None:
        raise errors.CheckpointError(errors.NO_CHECKPOINT.format(path=path))
    return found
