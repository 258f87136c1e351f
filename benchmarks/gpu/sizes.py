"""How large everything is: for a GPU, and small for a try on a processor."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from cells import CELLS, Cell, make_gpt


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is.

    Args:
        matmul: rows and columns of the matrices whose product is timed.
        fillers: pairs of width and depth of a GPT, the smallest first.
        length: tokens of its sequences.
        vocabulary: tokens it knows.
        micro_batches: of an update of it.
        cells: functions that make a `Cell` each, for precisions.
        updates: of each of these.
        contests: pairs of a dtype policy and a function that makes a `Cell`.
        rounds: of each contest.
        round_secs: of each round.
        memory_cell: function that makes the `Cell` whose memory is measured.
        widths: of the layers that are to run out of memory.
        beyond: how often the memory there is they would take.
        squeezed_bytes: what a processor is left with for them.
    """

    matmul: int
    fillers: tuple[tuple[int, int], ...]
    length: int
    vocabulary: int
    micro_batches: int
    cells: tuple[Callable[[], Cell], ...]
    updates: int
    contests: tuple[tuple[str, Callable[[], Cell]], ...]
    rounds: int
    round_secs: float
    memory_cell: Callable[[], Cell]
    widths: tuple[int, ...]
    beyond: float = 2.5
    squeezed_bytes: int = 200 * 2**20


def tiny_gpt():
    """Make a GPT of one narrow layer."""
    return make_gpt("gpt_tiny", width=32, depth=1, length=16, shape=(4, 8))


def large_gpt():
    """Make a GPT that keeps a card busy, and compiles soon."""
    return make_gpt(
        "gpt_large", width=768, depth=6, length=512, shape=(8, 8), heads=12
    )


def larger_batches(name, size):
    """Return a function that makes a cell with larger micro-batches."""
    return lambda: dataclasses.replace(CELLS[name](), micro_batch_size=size)


SMALL = Sizes(
    matmul=256,
    fillers=((32, 1),),
    length=16,
    vocabulary=64,
    micro_batches=2,
    cells=(CELLS["mlp"],),  # XLA knows no attention in float16 on a CPU
    updates=40,
    contests=(("float32", CELLS["mlp"]),),
    rounds=2,
    round_secs=0.01,
    memory_cell=tiny_gpt,
    widths=(256,) * 2,
)

FULL = Sizes(
    matmul=8192,
    fillers=(
        *((256, 4), (512, 6), (768, 12), (1024, 12)),
        *((1280, 16), (1536, 16), (2048, 16), (2560, 20)),
    ),
    length=1024,
    vocabulary=32_768,
    micro_batches=8,
    cells=(CELLS["mlp"], larger_batches("resnet", 64), large_gpt),
    updates=60,
    contests=(("float32", CELLS["mlp"]), ("mixed_bfloat16", large_gpt)),
    rounds=5,
    round_secs=0.5,
    memory_cell=large_gpt,
    widths=(2048,) * 16,
)
