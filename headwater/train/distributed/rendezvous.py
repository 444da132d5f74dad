"""Attempts of one run under torchrun, which starts all workers again when one has died.

Its store outlives them. There a worker learns that it is a later attempt, and there the workers of one attempt meet.
Nothing depends on torchrun's count of restarts: every machine counts for itself, and does not count one that it only
joined.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import torch.distributed as dist

from headwater.errors import UserError

MARK = ".launch"
PATIENCE = 1800  # seconds that ranks wait for one another before the first is at work


def launch() -> str:
    """A name that all attempts of one torchrun share and nothing else has; none where nobody would start us again."""
    if not dist.is_torchelastic_launched():
        return ""
    store, _, _ = next(dist.rendezvous("env://"))
    names = dist.PrefixStore("headwater", store)
    # The first attempt writes the name, the later ones read it.
    return names.compare_set("launch", "", uuid.uuid4().hex).decode()


def began(out: Path, launch: str) -> bool:
    """Tell whether an earlier attempt of this launch began the run in this folder."""
    mark = out / MARK
    if not launch or not mark.is_file():
        return False
    return mark.read_text(encoding="ascii", errors="replace") == launch


def claim(out: Path, launch: str) -> None:
    """Before anything of the run is written, so that what a later attempt finds is known to be ours."""
    if launch:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).write_text(launch, encoding="ascii")


def rendezvous(store: dist.Store, rank: int, world: int, patience: float = PATIENCE) -> dist.Store:
    """A corner of the store for this attempt alone: the rest of it has addresses of workers that have died.

    Every worker draws a number, which is never drawn again. The main rank names the corner after its own, and answers
    every number until all have come. Workers of earlier attempts are dead: nobody else answers, and nobody else comes.
    """
    store = dist.PrefixStore("headwater", store)
    number = store.add("numbers", 1)
    # Other ranks wait for an answer to their number.
    if rank:
        corner = store.get(f"corner-for-{number}").decode()  # waits for it
        store.add(f"came-to-{corner}", 1)
        return dist.PrefixStore(corner, store)
    corner, answered, deadline = f"attempt-{number}", 0, time.monotonic() + patience
    while (came := store.add(f"came-to-{corner}", 0)) < world - 1:
        if time.monotonic() > deadline:
            raise UserError(
                f"only {came + 1} of {world} ranks came within {patience:g} seconds: look at the others"
            )
        # Answer whoever has drawn a number since the last look.
        last_number = store.add("numbers", 0)
        for other in range(answered + 1, last_number + 1):
            store.set(f"corner-for-{other}", corner)
        answered = last_number
        time.sleep(0.01)
    return dist.PrefixStore(corner, store)
