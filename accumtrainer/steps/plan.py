"""Which plan a window runs by, and whether it is compiled with XLA."""

from dataclasses import dataclass
from typing import Literal

from accumtrainer import notebook
from accumtrainer.keras_api import BACKEND, flatten_layers
from accumtrainer.keras_api.types import Model
from accumtrainer.steps.backend import Backend
from accumtrainer.steps.memory import describe_bytes
from accumtrainer.window.backend import FIXED_DRAW

COMPILER = "torch.compile" if BACKEND == "torch" else "XLA"
"""What compiles the calls of a plan that are compiled."""

CONVOLUTIONS = frozenset(
    {
        "Conv2D",
        "Conv3D",
        "DepthwiseConv2dNative",
        "conv_general_dilated",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How windows run.

    Args:
        name: `"fused"`, one compiled call per window, or `"streamed"`, one
            per micro-batch and one to apply. Windows of unequal micro-batches
            run streamed under both, and so do those that PyTorch cannot record
            as a whole.
        jit_compile: whether XLA compiles the calls, or on PyTorch
            `torch.compile`.
        run_eagerly: whether nothing is compiled, for debugging.
        micro_batch_size: samples per micro-batch on each device, where they
            were chosen to fit into memory; else `None`.
        peak_bytes: memory that was predicted for it, `None` if unknown.
        limit_bytes: memory it had to fit into.
        measured_peak_bytes: most memory in use until the end of the first
            window of that size; `None` before it, and where nobody says it.
            What was in use earlier may count too: that window took no more.
            On a GPU it is the memory of the fullest device. On a CPU it is
            that of the whole process, with Python, libraries and data, of
            which the prediction knows nothing.
        measured_of: `"device"` or `"process"`, whose memory that is; `None`
            while nothing is measured.

    Examples:
        >>> str(Plan(name="fused", jit_compile=True))
        'fused, XLA'
    """

    name: Literal["fused", "streamed"]
    jit_compile: bool
    run_eagerly: bool = False
    micro_batch_size: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_of: Literal["device", "process"] | None = None

    def __str__(self) -> str:
        words: list[str] = [self.name]
        if self.run_eagerly:
            words.append("eager")
        elif self.jit_compile:
            words.append(COMPILER)
        if self.micro_batch_size is not None:
            words.append(f"{self.micro_batch_size} samples at a time")
        if self.peak_bytes is not None and self.limit_bytes is not None:
            peak = describe_bytes(self.peak_bytes)
            limit = describe_bytes(self.limit_bytes)
            words.append(f"{peak} of {limit} predicted")
        if self.measured_peak_bytes is not None:
            peak = describe_bytes(self.measured_peak_bytes)
            words.append(f"{peak} measured ({self.measured_of})")
        return ", ".join(words)

    def _repr_html_(self) -> str:
        sizes = {
            "samples at a time": self.micro_batch_size,
            "peak memory, predicted": self.peak_bytes,
            "memory to fit into": self.limit_bytes,
            f"peak memory of the {self.measured_of}": self.measured_peak_bytes,
        }
        rows = [
            [name, describe_bytes(size) if "memory" in name else size]
            for name, size in sizes.items()
            if size is not None
        ]
        title = notebook.paragraph(self)
        return title + notebook.table(["", ""], rows) if rows else title


def choose_plan(
    model: Model,
    operations: set[str],
    backend: Backend,
    *,
    jit_compile: bool | Literal["auto"],
    run_eagerly: bool,
) -> Plan:
    """Choose the plan that is fastest for a model on a device.

    On a CPU, XLA runs convolutions inside a loop many times slower than
    outside one, so models with convolutions are looped over without XLA on
    TensorFlow and streamed on JAX. Everywhere else a fused window under XLA
    has measured fastest. What TensorFlow evaluates there without XLA must not
    be trained with other draws.

    Args:
        operations: set of str, the operations of one micro-batch.
    """
    if run_eagerly:
        return Plan(name="fused", jit_compile=False, run_eagerly=True)
    loops_badly = bool(CONVOLUTIONS & operations) and (
        not backend.has_accelerator()
    )
    supports_jit = all(layer.supports_jit for layer in flatten_layers(model))
    if FIXED_DRAW in operations:
        supports_jit &= backend.compiles_evaluation
    name, is_compiled = backend.prefer(
        loops_badly=loops_badly, supports_jit=supports_jit
    )
    if jit_compile != "auto":
        is_compiled = jit_compile
    return Plan(name=name, jit_compile=is_compiled)


def should_compile_evaluation(
    backend: Backend, jit_compile: bool | Literal["auto"]
) -> bool:
    """Choose whether XLA compiles evaluation, where nothing loops.

    Returns:
        bool. On a CPU, TensorFlow evaluates as fast without waiting for XLA.
    """
    if jit_compile != "auto":
        return jit_compile
    return backend.compiles_evaluation
