"""Does a testbed show what it is for? Checks finished runs book by book; exit code 1 if it does not.

    replayssm-eval kl --model tiny-mamba2 --tokens 131072 --books moby-dick --books persuasion --output LONG \\
        --scheme nvfp4-rn@16 --scheme nvfp4@16 --scheme nvfp4/fp16@16
    replayssm-eval kl --model tiny-mamba2 --tokens 256 --books moby-dick --output EARLY \\
        --scheme nvfp4-rn@16 --scheme nvfp4@16 --seed 0 --seed 1 --seed 2 ...
    python scripts/check_testbed.py LONG EARLY                # --delta for tiny-gdn and tiny-kda

Late positions average 65,536 tokens; the first 256 see 15 roundings, and one draw of the noise decides two or three
tokens that make up most of the mean. There the stochastic scheme is averaged over all seeds of all runs given.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

NEAREST, STOCHASTIC, SEPARATE = "nvfp4-rn@16", "nvfp4@16", "nvfp4/fp16@16"
EARLY, VERY_EARLY, LATE = (0, 1024), 256, (65536, 131072)
# Without the delta rule, an error decays as the state does. With it, every write also erases the error along its key:
# a shared copy's drift levels off where writes erase as much as roundings add. Limits are half of the first curves'.
LIMITS = {"plain": (10, 30, 5, 1.5), "delta": (2, 10, 1.5, 1.2)}


def crossing(nearest: np.ndarray, stochastic: np.ndarray) -> int | None:
    """First position from which on nearest rounding is worse in every half-octave bin, None if there is none."""
    edges = np.unique(np.geomspace(64, len(nearest), 2 * int(np.log2(len(nearest) / 64)) + 1).astype(int))
    worse = [nearest[a:b].mean() > stochastic[a:b].mean() for a, b in itertools.pairwise(edges)]
    if not worse[-1]:
        return None
    last_better = max((i for i, w in enumerate(worse) if not w), default=-1)
    return int(edges[last_better + 1])


def check(
    kl: dict[str, np.ndarray], very_early: dict[str, list[float]], rule: str = "plain"
) -> list[tuple[str, float, bool]]:
    """(condition, measured value, holds) of one book.

    kl: per-token KL of the long run by scheme. very_early: mean KL of the first 256 tokens by scheme, one per seed.
    """

    def mean(scheme: str, span: tuple[int, int]) -> float:
        return float(kl[scheme][span[0] : span[1]].mean(dtype=np.float64))

    late = {scheme: mean(scheme, LATE) for scheme in (NEAREST, STOCHASTIC, SEPARATE)}
    seeds = len(very_early[STOCHASTIC])
    early_ratio = float(np.mean(very_early[NEAREST]) / np.mean(very_early[STOCHASTIC]))
    growth, gap, flat, worse = LIMITS[rule]
    ratios = [
        (f"{NEAREST} late / early >= {growth}", late[NEAREST] / mean(NEAREST, EARLY), growth, True),
        (f"{NEAREST} / {SEPARATE} late >= {gap}", late[NEAREST] / late[SEPARATE], gap, True),
        (f"{SEPARATE} late / early <= {flat}", late[SEPARATE] / mean(SEPARATE, EARLY), flat, False),
        (f"{NEAREST} / {STOCHASTIC} in the first {VERY_EARLY} tokens < 1 ({seeds} seeds)", early_ratio, 1, False),
        (f"{NEAREST} / {STOCHASTIC} late >= {worse}", late[NEAREST] / late[STOCHASTIC], worse, True),
    ]
    control = float(kl["control"].max())
    return [
        ("control is exactly 0", control, control == 0),
        *((name, r, r >= at if up else r <= at) for name, r, at, up in ratios),
    ]


def read(run: Path) -> pd.DataFrame:
    """The per-token file of a run with the books' titles."""
    titles = [b["title"] for b in json.loads((run / "kl.json").read_text())["corpus"]["books"]]
    table = pq.read_table(run / "kl.parquet", columns=["book", "scheme", "role", "seed", "position", "kl"]).to_pandas()
    table["title"] = [titles[b] for b in table.book]
    table["name"] = table.scheme.astype(str).where(table.role == "scheme", table.role.astype(str))
    return table.sort_values("position")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="one run or more per book, at least one of them of 131,072 tokens"
    )
    parser.add_argument("--delta", action="store_true", help="limits of a testbed with the delta rule")
    args = parser.parse_args()
    table = pd.concat([read(run) for run in args.runs])
    first = table[table.position < VERY_EARLY].drop_duplicates(["title", "name", "seed", "position"])
    failed = False
    for title, book in table.groupby("title", sort=False):
        long = book[book.seed == 0].groupby("name").kl.apply(lambda k: k.to_numpy() if len(k) >= LATE[1] else None)
        kl = {name: values[: LATE[1]] for name, values in long.items() if values is not None}
        if not kl.keys() >= {NEAREST, STOCHASTIC, SEPARATE, "control"}:
            sys.exit(f"{title}: no run of {LATE[1]:,} tokens with {NEAREST}, {STOCHASTIC} and {SEPARATE}")
        by_seed = first[first.title == title].groupby(["name", "seed"]).kl.mean()
        very_early = {name: by_seed[name].tolist() for name in (NEAREST, STOCHASTIC)}
        print(f"{title} (late is {LATE[0]:,}-{LATE[1]:,}, early the first {EARLY[1]:,})")
        for condition, value, holds in check(kl, very_early, "delta" if args.delta else "plain"):
            failed |= not holds
            print(f"  {'ok  ' if holds else 'FAIL'} {condition:65} {value:.4g}")
        print(
            f"       the curves of {NEAREST} and {STOCHASTIC} cross at about "
            f"{crossing(kl[NEAREST], kl[STOCHASTIC])} tokens"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
