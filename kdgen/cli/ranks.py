"""What commands that ranks run have in common: how many there are, by ``--tp`` and whatever has started them."""

from __future__ import annotations

import click

from kdgen.plan.shard import Exchange
from kdgen.ranks.place import Place


def agreed_ranks(place: Place | None, tp: int | None, exchange: Exchange | None) -> int:
    """Ranks of the job, of which this process is at ``place``, or which it is to start where that is None.

    Raises click.UsageError when ``--tp`` is another number than a launcher's, or when ``--exchange`` is given for one rank.
    """
    ranks = place.ranks if place else tp or 1
    if tp not in (None, ranks):
        raise click.UsageError(f"--tp {tp}, and the launcher has started {ranks} ranks: leave --tp out, or let them agree")
    if ranks == 1 and exchange is not None:
        raise click.UsageError("--exchange is between ranks: add --tp")
    return ranks
