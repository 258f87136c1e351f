"""The peak of memory by the number of micro-batches, a process for each."""

from contenders import make_loss

from accumtrainer import Accumulation, Trainer
from accumtrainer.diagnosis.device import measure_peak_memory


def rows(device, sizes, *, micro_batches):
    """Yield one row, of updates of that many micro-batches."""
    del device
    cell = sizes.memory_cell().with_micro_batches(micro_batches)
    trainer = Trainer(
        cell.make_model(),
        optimizer="adam",
        loss=make_loss(),
        accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
        seed=0,
    )
    x, y = cell.head(1)
    trainer.fit(x, y, batch_size=len(x), epochs=3, verbose=0)
    peak, of = measure_peak_memory()
    yield {
        "cell": cell.key,
        "micro-batches": cell.micro_batches,
        "samples in an update": len(x),
        "peak MiB": peak / 2**20,
        "of the": of,
        "plan": str(trainer.plan),
    }
