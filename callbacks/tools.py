"""Tools that only some callbacks need, imported where they are used."""

import importlib
from typing import Any


def import_tool(module: str, *, needs: str, extra: str) -> Any:
    """Import a module of a tool that may be missing.

    Args:
        module: name of the module.
        needs: what needs the tool, as the message begins.
        extra: name of the extra that brings it.

    Raises:
        ImportError: it is not installed; the message names the extra.

    Examples:
        >>> json = import_tool("json", needs="RunLog needs JSON", extra="json")
        >>> json.loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needs}, which is not installed. "
            f"Run: pip install 'accumtrainer[{extra}]'"
        ) from error
