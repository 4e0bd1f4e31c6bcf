"""Find where padding leaks into data: an abstract interpretation of spans over an exported graph.

A source is a padded tensor: a marked value, or an input whose spans the user gives. Each of its spanned dims, and its
rows, is followed as a `Track`: where valid positions lie in every tensor that derives from it. An operator leaks where
a valid position of its output depends on a position outside. That a mask has emptied the padding before cannot be
seen, so it is reported there, too; a leak is never missed.

    mel                                    # source: positions along 2
    x = conv1d(mel, kernel=7, padding=3)   # SG201: up to 3 positions at either end
    y = x / x.amax(-1, keepdim=True)       # SG201 at amax: every position; y's positions lie where x's do
    z = y / y.amax(0)                      # SG202: padding rows
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import fx
from torch._ops import OpOverload

from spangraph.diagnostics import Diagnostic
from spangraph.passes.leak_rules import PADS, ROUTES, Effect, Track, effect_of, elementwise
from spangraph.passes.nodes import aliased, val, where, written
from spangraph.passes.propagate_spans import NOT_KNOWN, Operation, overwritten, seen_from, shape_of, viewed
from spangraph.passes.span_maps import Place

ROWS = "rows"


@dataclass(frozen=True)
class Source:
    """A padded tensor from which padding is followed.

    Attributes:
        node: its node.
        label: what the report calls it.
        dims: its spanned dims, may be negative; the rows along dim 0 are always followed.
        padding: where positions outside the spans can lie: `"both"` ends, or only to the `"left"` or `"right"`.
    """

    node: fx.Node
    label: str
    dims: tuple[int, ...]
    padding: str = "both"


@dataclass(frozen=True)
class Leak:
    """An operator that lets padding into valid positions, or whose effect is not known.

    Attributes:
        rule: SG201 (positions), SG202 (rows) or SG203 (unknown effect).
        node: the operator's node.
        axis: what is mixed.
        before, after: how many valid positions of the output padding before and after them can touch, at that end.
        reason: what the operator does.
        shorter_than: only in rows that are shorter than so many positions of the source; `inf`: in any.
    """

    rule: str
    node: fx.Node
    axis: str
    before: float
    after: float
    reason: str
    shorter_than: float = inf


_State = tuple[Track, ...]


def diagnose_leaks(gm: fx.GraphModule, sources: Sequence[Source]) -> list[Diagnostic]:
    """SG201, SG202 and SG203 for a graph, as warnings; what an operator does alike to several axes is one of them."""
    axes: dict[Leak, list[str]] = {}
    for leak in find_leaks(gm.graph, sources)[0]:
        axes.setdefault(replace(leak, axis=""), []).append(leak.axis)
    return [_diagnose(leak, found) for leak, found in axes.items()]


def _diagnose(leak: Leak, axes: Sequence[str]) -> Diagnostic:
    op = getattr(leak.node.target, "__name__", str(leak.node.target)).partition(".")[0]
    what = " and ".join("rows" if axis == ROWS else f"positions of {axis}" for axis in axes)
    if leak.rule == "SG203":
        message = f"what {op} does to {what} is not known ({leak.reason}); what follows from there is not checked."
        fix = "declare spans for what comes out of it, or check by hand."
    elif leak.rule == "SG202":
        message = f"{op} mixes rows: {leak.reason}. Padding rows, and padding of shorter rows, may reach all of them."
        fix = "keep rows apart, or leave padding rows, and padding, out of it."
    else:
        ends = [(leak.before, "start"), (leak.after, "end")]
        reach = " and ".join(f"up to {int(count)} at its {end}" for count, end in ends if 0 < count < inf)
        reach = "every valid position" if inf in (leak.before, leak.after) else f"valid positions of a span, {reach}"
        short = "" if leak.shorter_than == inf else f", in rows of fewer than {int(leak.shorter_than)} positions"
        message = f"{op} mixes {what}: {leak.reason}. Padding reaches {reach}{short}."
        fix = (
            "take it over valid positions only (a masked sum by the number of them, -inf before a maximum or softmax)"
            if inf in (leak.before, leak.after)
            else "empty the padding just before it (torch.where(mask, x, 0)), declare spans without these positions"
        )
        fix += ", or accept that they depend on the padding: a delivered row is what the padded output holds."
    return Diagnostic(leak.rule, message, where(leak.node), fix=fix, severity="warning")


def find_leaks(graph: fx.Graph, sources: Sequence[Source]) -> tuple[list[Leak], dict[fx.Node, _State]]:
    """Follow the sources' spans through a graph with static shapes and fake values.

    Returns:
        What leaks, in graph order, and for each derived tensor the tracks that it still has.
    """
    return _Follower(graph, sources).run()


class _Follower:
    def __init__(self, graph: fx.Graph, sources: Sequence[Source]) -> None:
        self._graph = graph
        self._leaks: dict[tuple[fx.Node, str, str], Leak] = {}
        self._states: dict[fx.Node, _State] = {}
        self._parts: dict[fx.Node, list[_State]] = {}  # of nodes that give several tensors
        self._bases: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, list[fx.Node]] = {}
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        for source in sources:
            self._begin(source)

    def run(self) -> tuple[list[Leak], dict[fx.Node, _State]]:
        for node in self._graph.nodes:
            origin = aliased(node)
            base = self._bases[node] = self._bases[origin] if origin is not None else node
            self._views.setdefault(base, []).append(node)
            if node.op == "call_function" and any(self._tracks(source) for source in node.all_input_nodes):
                targets = [(target, self._tracks(target)) for target in written(node)]
                self._add(node, self._follow(node))
                for target, known in targets:
                    self._write(node, target, known)
        return sorted(self._leaks.values(), key=lambda leak: self._order[leak.node]), self._states

    def _begin(self, source: Source) -> None:
        """Give the source, and what it is a view of, its tracks."""
        before, after = (inf if source.padding in ("both", side) else 0 for side in ("left", "right"))
        shape = shape_of(source.node)
        # Padding rows come last; but rows are not alike: where one has data, one before it may have padding.
        rows = Track(ROWS, Place(0), inf if source.dims else 0, inf, shape[0] if shape else 0)
        state: _State = (rows,)
        for dim in source.dims:
            place = Place(dim % len(shape))
            state += (Track(f"{source.label!r} along dim {dim}", place, before, after, shape[place.dim]),)
        node: fx.Node | None = source.node
        while node is not None:
            self._add(node, state)
            view, node = node, viewed(node)
            if node is not None:
                above = [(track, seen_from(view, node, track.place)) for track in state]
                state = tuple(replace(track, place=place) for track, place in above if place is not None)

    def _add(self, node: fx.Node, state: _State) -> None:
        if state := tuple(dict.fromkeys((*self._states.get(node, ()), *state))):
            self._states[node] = state

    def _tracks(self, node: fx.Node) -> _State:
        state = self._states.get(node, ())
        return state + tuple(track for part in self._parts[node] for track in part) if node in self._parts else state

    # ---- one operator ----------------------------------------------------------------------------------------------

    def _follow(self, node: fx.Node) -> _State:
        """The tracks of a node with at least one derived operand; leaks are noted."""
        target = node.target
        if target is operator.getitem and (parts := self._parts.get(node.args[0])):  # type: ignore[arg-type]
            return parts[node.args[1]]  # type: ignore[index]
        if not isinstance(target, OpOverload):
            return self._unknown(node)
        if not target._schema.returns:
            return self._unknown(node) if written(node) else ()
        operation = Operation(node, target, lambda source: bool(self._tracks(source)))
        if not operation.is_static:
            return self._unknown(node, "a size is only known when it runs")
        found: list[_State] = []
        for index in range(len(operation.outs)):
            tracks: list[Track] = []
            is_used = not operation.gives_several or _is_used(node, index)
            for name, source in operation.operands if is_used else ():
                call = operation.call(name, source, index)
                for track in self._tracks(source):
                    if operation.is_elementwise:
                        effect = elementwise(track, call.shape, call.out)
                    else:
                        effect = effect_of(operation.packet, call, track)
                    if (landed := self._land(operation, track, effect)) is not None:
                        tracks.append(landed)
            found.append(self._join(node, tracks))
        if operation.gives_several:
            self._parts[node] = found
            return ()
        return found[0]

    def _land(self, operation: Operation, track: Track, effect: Effect) -> Track | None:
        """Note what leaks, and return the track afterwards."""
        node = operation.node
        before, after = effect.before if track.before else 0, effect.after if track.after else 0
        limit = max(track.before if before else 0, track.after if after else 0)
        self._note_mixing(node, track, before, after, effect.reason, limit)
        if effect.place is None:
            if not (effect.before or effect.after):
                rule = "SG202" if track.axis == ROWS and operation.packet in ROUTES else "SG203"
                self._note(node, rule, track.axis, effect.reason)
            return None
        if effect.place is track.place and not (before or after):
            return track
        moved = replace(track, place=effect.place)
        if moved.is_reversed != track.is_reversed:
            moved = replace(moved, before=track.after, after=track.before)
        copied = self._copied(operation, track, moved)
        # What lies before the first valid position has seen what a short row has behind its last one.
        seen_before = max(copied, moved.shorter_than(after) if after and moved.origin > 0 else 0)
        seen_after = max(copied, moved.shorter_than(before))
        if seen_before > moved.before or seen_after > moved.after:
            moved = replace(moved, before=max(moved.before, seen_before), after=max(moved.after, seen_after))
        return moved

    def _copied(self, operation: Operation, track: Track, moved: Track) -> float:
        """In which rows copies that an operator pads with hold padding: those shorter than so many positions."""
        if operation.packet not in PADS or moved.moves == track.moves or not (track.before or track.after):
            return 0
        args = operation.args
        mode = str(args.get("mode", operation.node.target))
        copies = next((kind for kind in ("reflect", "circular", "replicat") if kind in mode), None)
        if copies and track.is_cut:  # they stand where positions were cut off, which something else may still have
            self._note_mixing(operation.node, track, inf, inf, "it fills with copies where positions were cut off")
        if copies == "reflect":
            return moved.shorter_than(max(args.get("pad") or args["padding"]) + 1)
        return inf if copies == "circular" else 0

    def _join(self, node: fx.Node, tracks: list[Track]) -> _State:
        """All tracks of all operands; those of one axis along one dim must lie at the same place."""
        if len({(track.axis, track.dim) for track in tracks}) == len(tracks):
            return tuple(tracks)
        kept: dict[tuple[str, int], Track] = {}
        if overwritten(node) is None:  # else it is the first operand that stays where it is
            tracks = sorted(tracks, key=lambda track: abs(track.origin))
        for track in tracks:
            first = kept.setdefault((track.axis, track.dim), track)
            if first.moves != track.moves:
                before, after = first.misses(track)
                before, after = before if track.before else 0, after if track.after else 0
                self._note_mixing(node, track, before, after, "it combines positions that lie elsewhere")
            if track.before > first.before or track.after > first.after:
                both = max(first.before, track.before), max(first.after, track.after)
                kept[track.axis, track.dim] = replace(first, before=both[0], after=both[1])
        return tuple(kept.values())

    def _unknown(self, node: fx.Node, reason: str = NOT_KNOWN) -> _State:
        for axis in {track.axis: None for source in node.all_input_nodes for track in self._tracks(source)}:
            self._note(node, "SG203", axis, reason)
        return ()

    def _note_mixing(
        self, node: fx.Node, track: Track, before: float, after: float, reason: str, shorter_than: float = inf
    ) -> None:
        """SG201 or SG202, if padding reaches anything."""
        if before or after:
            is_rows = track.axis == ROWS
            rule, limit = ("SG202", inf) if is_rows else ("SG201", shorter_than)
            self._note(node, rule, track.axis, reason, before, after, limit)

    def _note(
        self,
        node: fx.Node,
        rule: str,
        axis: str,
        reason: str,
        before: float = inf,
        after: float = inf,
        shorter_than: float = inf,
    ) -> None:
        if (known := self._leaks.get((node, rule, axis))) is not None:
            before, after = max(before, known.before), max(after, known.after)
            shorter_than = max(shorter_than, known.shorter_than)
        self._leaks[node, rule, axis] = Leak(rule, node, axis, before, after, reason, shorter_than)

    # ---- writes ----------------------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, target: fx.Node, known: _State) -> None:
        """`node` has written something derived into `target`, which had the tracks `known`; the other views of that
        memory show it from now on."""
        state = self._tracks(node)
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            self._states[target] = state
            return
        sources = [source for source in node.all_input_nodes if source is not target]
        axes = {track.axis: None for source in (node, *sources) for track in self._tracks(source)}
        changed = [axis for axis in axes if _of(axis, state) != _of(axis, known) or not _of(axis, state)]
        if not changed:
            return
        base, at = self._bases[target], self._order[node]
        # Views whose last use is behind are of no interest any more.
        views = self._views[base] = [view for view in self._views[base] if self._last_use(view) > at or view is node]
        is_whole = aliased(node) is target
        for view in views:
            if is_whole and (view is target or _is_same_view(view, target)):
                self._states[view] = state
            elif view is not node:
                for axis in changed:
                    self._note(node, "SG203", axis, f"it writes into the memory of {view}")

    def _last_use(self, node: fx.Node) -> int:
        return max((self._order[user] for user in node.users), default=-1)


def _of(axis: str, state: _State) -> set[Track]:
    return {track for track in state if track.axis == axis}


def _is_used(node: fx.Node, index: int) -> bool:
    """Whether anything uses an output of an operator that gives several."""
    return any(user.target is not operator.getitem or (user.args[1] == index and user.users) for user in node.users)


def _is_same_view(view: fx.Node, target: fx.Node) -> bool:
    one, other = val(view), val(target)
    return bool(
        one.shape == other.shape and one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    )
