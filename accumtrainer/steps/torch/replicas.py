"""Several processes of PyTorch: who has what, what they add up."""

from collections.abc import Sequence

from accumtrainer.keras_api.types import Tensor, Variable
from accumtrainer.window.backend import Replicas


class TorchReplicas(Replicas):
    """One device, in one process."""

    def read(self, variables: Sequence[Variable]) -> list[Tensor]:
        # Values that stay, whatever is assigned.
        return [variable.value.clone() for variable in variables]
