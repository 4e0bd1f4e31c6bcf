"""Random pipelines: the rules of `Pipeline.verify` against the executor that defines them, for as long as you like.

Prints how many pipelines and conflicts there were, how many schedules were played, and every mismatch.

    python benchmarks/speculation.py [--examples 10000] [--seed 7]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import hypothesis

from spangraph.pipeline import Pipeline
from spangraph.testing import SimulatedDevice

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from pipelines import found_by_executor, found_by_rules, pipelines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    device, start = SimulatedDevice(), time.perf_counter()

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(pipelines())
    def check(pipeline: Pipeline) -> None:
        counts["pipelines"] += 1
        for walk in pipeline.walks:
            rules = found_by_rules(pipeline, walk)
            found, plays = found_by_executor(pipeline, walk, device)
            counts.update(walks=1, conflicts=len(found), plays=plays)
            if rules != found:
                counts["mismatches"] += 1
                print(f"walk {walk!r} of {pipeline}:\n  only the rules find {sorted(rules - found)}, only the executor")
                print(f"  {sorted(found - rules)}", flush=True)

    check()
    seconds = time.perf_counter() - start
    print(
        f"seed {options.seed}: {counts['pipelines']} pipelines, {counts['walks']} walks,"
        f" {counts['conflicts']} conflicts, {counts['plays']} plays, {counts['mismatches']} mismatches, {seconds:.0f} s"
    )
    return counts["mismatches"] > 0


if __name__ == "__main__":
    sys.exit(main())
