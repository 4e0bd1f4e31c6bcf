"""The ring protocol, searched exhaustively: `ring_protocol` says what is modelled."""

import re
from collections.abc import Callable

import pytest

from .ring_lifetimes import HoldBack, Lease
from .ring_protocol import Staging
from .ring_search import Model, search

# The rings that engines use: depth 1 (no overlap), 2 and 3. Six launches go round the 3 to 5 slots and records.
HOLDS = [
    *[Staging(depth) for depth in (1, 2, 3)],
    *[Staging(depth, shared=True) for depth in (1, 2, 3)],
    # No spare slots; as many records as one fault needs.
    Staging(2, num_slots=2),
    Staging(2, shared=True, num_records=3),
    *[Lease(depth) for depth in (1, 2, 3)],
    *[HoldBack(depth) for depth in (1, 2, 3)],
    HoldBack(2, graphs=2),
]

# Each part of the protocol left out, at a depth where it is needed, and what then goes wrong.
FAILS = [
    (Staging(1, without="release"), "the reader of step 1 gets words of another launch"),
    (Staging(2, without="reservation"), "belongs to generation|gets words of"),
    (Staging(1, num_records=1), "is written to slot"),
    (Staging(2, num_records=2), "is written to slot"),
    (Staging(2, without="header check"), "gets words of another launch"),
    (Staging(1, without="quarantine"), "is written to slot"),
    (Staging(1, num_slots=1, without="copy before free"), "gets words of"),
    (Staging(1, num_slots=1, without="lock"), "gets words of"),
    (Staging(1, without="synchronize"), "gets words of another launch"),
    # The steps of one graph are told apart by the cursor alone. Behind a replay without its staging node the next one
    # of that graph finds the earlier record, and the earlier step gets the later one's rows, not an error.
    (Staging(2, shared=True, without="settling"), "gets words of another launch"),
    (Lease(1, without="release"), "step 1 gets rows of"),
    (Lease(2, without="lease"), "its rows have changed before"),
    (Lease(1, without="consumer wait"), "a consumer of step 1 reads rows of"),
    (HoldBack(1, without="release"), "cut by the flag of an earlier step"),
    (HoldBack(2, without="hold-back"), "step 1 gets rows of"),
]


def _name(value: object) -> str:
    """What differs from the default."""
    if isinstance(value, str):
        return ""
    plain = vars(type(value)(value.depth))
    return type(value).__name__ + "".join(
        f" {key}={item}"
        for key, item in vars(value).items()
        if key == "depth" or (item != plain[key] and key != "injected")
    )


@pytest.mark.parametrize("model", HOLDS, ids=_name)
def test_the_protocol_holds(model: Model, record_property: Callable[[str, object], None]) -> None:
    result = search(model)
    assert not result.violation, str(result)
    record_property("counted", f"{result.num_states} states")


@pytest.mark.parametrize(("model", "violation"), FAILS, ids=_name)
def test_no_part_can_be_left_out(model: Model, violation: str, record_property: Callable[[str, object], None]) -> None:
    result = search(model)
    print(result)
    assert re.search(violation, result.violation), str(result)
    assert len(result.trace) >= 3
    record_property("counted", f"{result.violation}, after {len(result.trace)} actions ({result.num_states} states)")
