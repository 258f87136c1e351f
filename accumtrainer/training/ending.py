"""How far an epoch has ended, which callbacks may save amid that."""

from dataclasses import dataclass, field
from typing import Any

from accumtrainer.saving.callback_state import CallbackStates, savable


@dataclass(slots=True)
class Ending:
    """The end of an epoch.

    Args:
        is_counted: whether the epoch is counted among those that have ended.
        is_complete: whether all of its windows have run.
        told: callbacks that have been told of its end.
        logs: what these were told, and wrote into it.
    """

    is_counted: bool = False
    is_complete: bool = False
    told: list[Any] = field(default_factory=list)
    logs: dict[str, Any] = field(default_factory=dict)

    def get_state(self, states: CallbackStates) -> dict[str, Any]:
        """Return what `of_state` needs, plain values and arrays."""
        return {
            "is_counted": self.is_counted,
            "is_complete": self.is_complete,
            "told": states.keys_of(self.told),
            "logs": savable(self.logs),
        }

    @classmethod
    def of_state(
        cls, state: dict[str, Any], states: CallbackStates
    ) -> "Ending":
        """Make one of what `get_state` returned."""
        return cls(
            is_counted=state["is_counted"],
            # Older checkpoints do not say.
            is_complete=state.get("is_complete", False),
            told=states.of_keys(state["told"]),
            logs=dict(state["logs"]),
        )
