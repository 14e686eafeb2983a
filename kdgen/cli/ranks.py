"""The number of ranks of a command: what ``--tp`` and the launcher say."""

from __future__ import annotations

import click

from kdgen.plan.shard import Exchange
from kdgen.ranks.place import Place


def agreed_ranks(place: Place | None, tp: int | None, exchange: Exchange | None) -> int:
    """The number of ranks of the job. This process is the one at ``place``; if that is None, it has to start them.

    Raises click.UsageError when ``--tp`` differs from the launcher's number, or when ``--exchange`` is given for one rank.
    """
    ranks = place.ranks if place else tp or 1
    if tp not in (None, ranks):
        raise click.UsageError(f"--tp {tp} differs from the launcher's {ranks} ranks: leave --tp out, or give both the same number")
    if ranks == 1 and exchange is not None:
        raise click.UsageError("--exchange needs several ranks: add --tp")
    return ranks
