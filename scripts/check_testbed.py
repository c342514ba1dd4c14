"""Does a testbed show what it is for? Checks a finished 131,072-token run, book by book; exit code 1 if it does not.

    replayssm-eval kl --model tiny-mamba2 --tokens 131072 --books moby-dick --books persuasion --output RUN \\
        --scheme nvfp4-rn@16 --scheme nvfp4@16 --scheme nvfp4/fp16@16
    python scripts/check_testbed.py RUN
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

NEAREST, STOCHASTIC, SEPARATE = "nvfp4-rn@16", "nvfp4@16", "nvfp4/fp16@16"
EARLY, VERY_EARLY, LATE = (0, 1024), (0, 256), (65536, 131072)


def crossing(nearest: np.ndarray, stochastic: np.ndarray) -> int | None:
    """First position from which on nearest rounding is worse in every half-octave bin, None if there is none."""
    edges = np.unique(np.geomspace(64, len(nearest), 2 * int(np.log2(len(nearest) / 64)) + 1).astype(int))
    worse = [nearest[a:b].mean() > stochastic[a:b].mean() for a, b in itertools.pairwise(edges)]
    if not worse[-1]:
        return None
    last_better = max((i for i, w in enumerate(worse) if not w), default=-1)
    return int(edges[last_better + 1])


def check(kl: dict[str, np.ndarray]) -> list[tuple[str, float, bool]]:
    """(condition, measured value, holds) of one book's per-token KL by scheme."""

    def mean(scheme: str, span: tuple[int, int]) -> float:
        return float(kl[scheme][span[0] : span[1]].mean(dtype=np.float64))

    late = {scheme: mean(scheme, LATE) for scheme in (NEAREST, STOCHASTIC, SEPARATE)}
    ratios = [
        (f"{NEAREST} late / early >= 10", late[NEAREST] / mean(NEAREST, EARLY), 10, True),
        (f"{NEAREST} / {SEPARATE} late >= 30", late[NEAREST] / late[SEPARATE], 30, True),
        (f"{SEPARATE} late / early <= 5", late[SEPARATE] / mean(SEPARATE, EARLY), 5, False),
        (f"{NEAREST} / {STOCHASTIC} in the first 256 tokens < 1", mean(NEAREST, VERY_EARLY) / mean(STOCHASTIC, VERY_EARLY), 1, False),
        (f"{NEAREST} / {STOCHASTIC} late >= 1.5", late[NEAREST] / late[STOCHASTIC], 1.5, True),
    ]
    control = float(kl["control"].max())
    return [("control is exactly 0", control, control == 0), *((name, r, r >= at if up else r <= at) for name, r, at, up in ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    titles = [b["title"] for b in json.loads((run / "kl.json").read_text())["corpus"]["books"]]
    table = pq.read_table(run / "kl.parquet", columns=["book", "scheme", "role", "seed", "position", "kl"]).to_pandas()
    failed = False
    for book, title in enumerate(titles):
        rows = table[(table.book == book) & (table.seed == 0) & (table.role != "reference")].sort_values("position")
        names = rows.scheme.astype(str).where(rows.role == "scheme", "control")
        kl = {name: group.to_numpy() for name, group in rows.kl.groupby(names)}
        print(f"{title} ({len(kl['control']):,} tokens; late is {LATE[0]:,}-{LATE[1]:,}, early the first {EARLY[1]:,})")
        for condition, value, holds in check(kl):
            failed |= not holds
            print(f"  {'ok  ' if holds else 'FAIL'} {condition:55} {value:.4g}")
        print(f"       the curves of {NEAREST} and {STOCHASTIC} cross at about {crossing(kl[NEAREST], kl[STOCHASTIC])} tokens")
    sys.exit(failed)


if __name__ == "__main__":
    main()
