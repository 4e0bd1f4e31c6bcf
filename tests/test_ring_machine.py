"""The ring under random launches, waits, reads, ends and faults: no row is wrong, and no slot leaks."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .ring_machine import RingMachine
from .ring_oracle import FAULTS

NUM_STEPS, NUM_EXAMPLES = 100, 50


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each row that is held past its release is a warning."""
    logger = logging.getLogger("spangraph")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_no_row_is_wrong_and_no_slot_leaks(record_property: Any) -> None:
    figures = RingMachine.figures
    figures.clear()
    options = settings(
        stateful_step_count=NUM_STEPS + 1,  # the first builds the engine
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        phases=[Phase.generate],
    )
    run_state_machine_as_test(RingMachine, settings=options)
    record_property("counted", ", ".join(f"{count} {name}" for name, count in sorted(figures.items())))
    assert figures["steps"] >= NUM_STEPS * NUM_EXAMPLES
    assert figures["launches"] >= figures["steps"] // 8
    assert figures["rows compared"] >= figures["steps"] // 4
    for name in (
        *(f"fault {kind}" for kind in FAULTS),
        "released",
        "cancelled",
        "dropped",
        "late readers",
        "overflows",
    ):
        assert figures[name] > 0, name
