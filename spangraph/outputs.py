"""What becomes of a graph's outputs: which are cut, copied and kept, and how a step's result is made of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from spangraph.backends import Backend
from spangraph.cuts import Cut, make_cut
from spangraph.launch import Launch
from spangraph.passes.insert_staging import Copied
from spangraph.passes.marks import Mark
from spangraph.passes.nodes import is_part_of, storage_roots, val, written
from spangraph.passes.prepare import Prepared
from spangraph.rows import Rows
from spangraph.slots import Copy, Region
from spangraph.step import Results, Step
from spangraph.structure import Constant, Leaf
from spangraph.trace import Trace


@dataclass(frozen=True)
class Outputs:
    """What becomes of a graph's outputs.

    Attributes:
        names: public name -> cut.
        cuts: output -> cut, of all that are cut.
        copied: the cuts whose rows are copied, each part of a copy slot once, and where they come from.
        keep: outputs that the graph returns.
        holds: whether steps lease some of them.
        may_overflow: whether some copies may not fit.
    """

    names: Mapping[str, Cut]
    cuts: dict[int, Cut]
    copied: Sequence[tuple[Cut, Copied]]
    keep: Sequence[int]
    holds: bool
    may_overflow: bool


def plan_outputs(
    trace: Trace,
    prepared: Prepared,
    copies: Mapping[str, Copy],
    names: Sequence[str],
    column_of: Mapping[fx.Node, str],
    num_rows: int,
) -> tuple[Outputs, list[tuple[Copy, int]]]:
    """Decide what is cut, copied and kept.

    Args:
        copies: how rows are copied, by the name of their spanned output.
        names: public names of the graph's marks.
        column_of: the column that each mark's spans or row values are staged in.
        num_rows: of the batch.

    Returns:
        the plan, in which the regions of a copy slot have no place yet (see `place_copies`), and what a slot must hold:
        copies and their bytes.
    """
    marks, results = prepared.marks, prepared.results
    by_name: dict[str, Cut] = {}
    mark_of: dict[str, Mark] = {}
    for name, mark, output in zip(names, marks, prepared.value_outputs, strict=True):
        if mark.info.span is not None:
            by_name[name] = make_cut(name, column_of[mark.staged], output, mark.info.span, val(mark.value))
            mark_of[name] = mark
    cuts: dict[int, Cut] = {}
    for plan in prepared.cuts:
        cut = by_name[names[plan.mark]]
        if plan.output == cut.output and plan.span_map == cut.span_map:
            cuts[plan.output] = cut
            continue
        own = trace.leaf_names[plan.output] if plan.output < len(trace.leaf_names) else ""
        label = cut.name if plan.output == cut.output or not own else f"{cut.name} (output {own})"
        shape = list(val(results[plan.output]).shape)
        del shape[plan.span_map.row_dim]
        cuts[plan.output] = replace(
            cut,
            output=plan.output,
            span_map=plan.span_map,
            label=label,
            row_shape=tuple(shape),
            dtype=val(results[plan.output]).dtype,
        )
    wanted: list[tuple[Copy, int]] = []
    copied: dict[Any, tuple[Cut, Copied]] = {}
    may_overflow = False

    def copy(cut: Cut) -> Cut:
        """The cut as it is copied, if it is."""
        nonlocal may_overflow
        option = _copy_of(copies, cut.name, mark_of[cut.name])
        if option.dtype is not None and not is_part_of(results[cut.output], mark_of[cut.name].value):
            option = replace(option, dtype=None)  # what is computed from the audio, levels or a mask, is no audio
        if option.to == "view":
            return cut
        key = cut.output, cut.column, cut.span_map, option
        if key not in copied:
            mark = mark_of[cut.name]
            assert mark.spans is not None, "it is no row value"
            placed = cut.copied_to(Region(len(wanted), 0, option.to == "host", 0, 0), option)
            worst = placed.padded_bytes(num_rows)
            wanted.append((option, worst if option.capacity is None else min(option.capacity, worst)))
            may_overflow |= option.capacity is not None and option.capacity < worst
            copied[key] = placed, Copied(cut.output, mark.spans, cut.widths, cut.span_map)
        region = copied[key][0].region
        assert region is not None, "it is copied"
        return cut.copied_to(region, option)

    by_name = {name: copy(cut) for name, cut in by_name.items()}
    cuts = {output: copy(cut) for output, cut in cuts.items()}
    views = {cut.output for cut in (*by_name.values(), *cuts.values()) if cut.region is None}
    whole = {i for i in range(len(trace.leaf_names)) if i not in cuts}
    # Where all else is copied, spans and row values are delivered from the slot, so that nothing is leased.
    holds = not copied or bool(views) or not whole <= set(prepared.staged_outputs)
    keep = views | (whole if holds else set())
    keep |= {cut.output for cut, _ in copied.values()} if may_overflow else set()
    if not copied:
        keep = set(range(len(results)))
    return Outputs(by_name, cuts, list(copied.values()), sorted(keep), holds, may_overflow), wanted


def _copy_of(copies: Mapping[str, Copy], name: str, mark: Mark) -> Copy:
    for asked in (name, mark.full_name, mark.info.name):
        if asked in copies:
            return copies[asked]
    return Copy("view")


def place_copies(outputs: Outputs, regions: Sequence[Region]) -> Outputs:
    """The same with regions where the copy slots have them, and outputs counted as the graph returns them."""

    @functools.cache
    def place(cut: Cut) -> Cut:
        output = outputs.keep.index(cut.output) if cut.output in outputs.keep else -1
        return replace(cut, output=output, region=None if cut.region is None else regions[cut.region.index])

    return replace(
        outputs,
        names={name: place(cut) for name, cut in outputs.names.items()},
        cuts={output: place(cut) for output, cut in outputs.cuts.items()},
        copied=[(place(cut), source) for cut, source in outputs.copied],
    )


def make_results(
    trace: Trace,
    prepared: Prepared,
    outputs: Outputs,
    column_of: Mapping[fx.Node, str],
    num_rows: int,
    backend: Backend,
    *,
    debug: bool,
) -> Results:
    """Functions that build a step's result in the model's own output structure: with rows, and with owned rows.

    Args:
        column_of, num_rows: as for `plan_outputs`.
        debug: whether outputs are poisoned at the release, so that owned ones must be copies.
    """
    of_inputs = _of_inputs(prepared.gm.graph)

    def constant(step: Step, launch: Launch, value: Any) -> Any:
        return value

    def noted(step: Step, launch: Launch, cut: Cut) -> Rows:
        return step.cut_rows(cut)

    def owned(step: Step, launch: Launch, cut: Cut) -> Rows:
        return step.cut_rows(cut).own()

    def real(value: Tensor, launch: Launch) -> Tensor:
        """Without padding rows, where it has a row per row of the batch."""
        real = launch.num_rows
        return value[:real] if real < num_rows and value.shape[:1] == (num_rows,) else value

    def whole(step: Step, launch: Launch, kept: tuple[int, bool]) -> Tensor:
        index, is_table = kept
        value = step.output(index)
        return value if is_table or launch.num_rows == num_rows else real(value, launch)

    def cloned(step: Step, launch: Launch, kept: tuple[int, bool]) -> Tensor:
        return whole(step, launch, kept).clone()

    def staged(step: Step, launch: Launch, column: tuple[str, Sequence[int]]) -> Tensor:
        return real(step.staged(*column).to(backend.device), launch)

    rows = noted if backend.static else Rows
    own_whole = cloned if backend.static or debug else whole
    views: list[Leaf] = []
    owns: list[Leaf] = []
    for leaf in trace.out_leaves:
        made: Leaf
        own: Leaf
        if isinstance(leaf, Constant):
            made = own = (constant, leaf.value)
        elif (cut := outputs.cuts.get(leaf)) is not None:
            made, own = (rows, cut), (owned, cut)
        elif leaf in outputs.keep:
            kept = outputs.keep.index(leaf), prepared.results[leaf] not in of_inputs
            made, own = (whole, kept), (own_whole, kept)
        else:
            mark = prepared.marks[prepared.staged_outputs[leaf]]
            made = own = (staged, (column_of[mark.staged], val(mark.staged).shape))
        views.append(made)
        owns.append(own)
    return trace.result_maker(views), trace.result_maker(owns)


def _of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on the inputs."""
    found: set[fx.Node] = set()
    roots = storage_roots(graph)
    for node in graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes) or roots[node] in found:
            found.add(node)
            found.update(roots[target] for target in written(node))
    return found
