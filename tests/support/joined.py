"""A plugin of pytest: these tests run in one of several processes of PyTorch.

    JOINED="1 2 /tmp/store" pytest -p joined FILES

It joins the other process as the second of two; they find each other by the
file, which is new. What makes replicas then has one in every process.
"""

import os

JOINED = os.environ.get("JOINED", "")
"""Index of this process, how many there are, and a path."""


def pytest_collection_finish(session):
    """Join the others, when the backend is set up."""
    import torch

    process, processes, path = JOINED.split(" ", 2)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        world_size=int(processes),
        rank=int(process),
    )


def of_process(process, processes, path):
    """Make the environment of one of them."""
    return os.environ | {"JOINED": f"{process} {processes} {path}"}
