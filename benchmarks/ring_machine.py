"""Runs the ring machine of the tests for as many steps as asked, and prints what it saw.

    python benchmarks/ring_machine.py --steps 100000 --seed 1

A row that is wrong, a slot that leaks or a step that ends otherwise than it must stops the run with the example's seed.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("SPANGRAPH_DEBUG", "1")

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.ring_machine import WEIGHTED, World

STEPS_PER_EXAMPLE = 100


def run_example(seed: int, num_steps: int, figures: Counter[str], *, verbose: bool = False) -> None:
    """One engine, and random rules on it."""
    rng = random.Random(seed)
    world = World(rng, figures)
    try:
        for _ in range(num_steps):
            name, rule_seed = rng.choice(WEIGHTED), rng.getrandbits(32)
            if verbose:
                print(f"{name} {rule_seed}: {world.ring.describe()}")
            world.run(name, rule_seed)
    except BaseException:
        world.stop()
        raise
    world.finish()


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--example", type=int, help="run this example alone, and say what it does")
    args = parser.parse_args()
    logging.getLogger("spangraph").setLevel(logging.ERROR)
    figures: Counter[str] = Counter()
    if args.example is not None:
        run_example(args.example, STEPS_PER_EXAMPLE, figures, verbose=True)
        return 0
    seeds = random.Random(args.seed)
    started, cpu = time.perf_counter(), time.process_time()
    wrong = leaked = 0
    while figures["steps"] < args.steps and not wrong + leaked:
        seed = seeds.getrandbits(32)
        try:
            run_example(seed, min(STEPS_PER_EXAMPLE, args.steps - figures["steps"]), figures)
        except AssertionError as error:
            wrong, leaked = "WRONG" in str(error), "LEAKED" in str(error)
            print(f"example {seed} failed: run it alone with --example {seed}")
            if not wrong + leaked:
                raise
            print(error)
        except BaseException:
            print(f"example {seed} failed: run it alone with --example {seed}")
            raise
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads")
    for name, count in sorted(figures.items()):
        print(f"{name:32} {count:>10,}")
    print(f"{'wrong rows':32} {int(wrong):>10,}")
    print(f"{'slots leaked':32} {int(leaked):>10,}")
    print(f"{time.perf_counter() - started:.1f} s, {time.process_time() - cpu:.1f} s of CPU")
    return int(wrong or leaked)


if __name__ == "__main__":
    sys.exit(main())
