"""The list of the passes, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from spangraph.diagnostics import Diagnostic
from spangraph.passes.host_reads import erase_assertions, refuse_host_reads
from spangraph.passes.insert_staging import erase_marks
from spangraph.passes.leaks import Source, diagnose_leaks
from spangraph.passes.marks import Mark, MarkInfo, find_marks, hoist_marks
from spangraph.passes.memory import diagnose_kept_spans, isolate_outputs, snapshot_spans
from spangraph.passes.nodes import result_nodes
from spangraph.passes.plan_cuts import PlannedCut, deliver_values, plan_cuts


@dataclass(frozen=True)
class Prepared:
    """A graph that is ready for its staging node, and what its marks say.

    Attributes:
        gm: the graph without marks. Outputs beyond the model's own are marked values.
        marks: in the order in which they fired.
        cuts: which outputs are cut.
        results: the graph's output nodes.
        value_outputs: for each mark, which output its value is; -1 for row values.
        staged_outputs: outputs that are what some mark stages: output -> mark.
        diagnostics: SG203 for outputs that derive from a spanned value and are delivered whole; SG201, SG202 and SG203
            where padding may leak, SG206 where spans may be stale. All are warnings.
    """

    gm: fx.GraphModule
    marks: list[Mark]
    cuts: list[PlannedCut]
    results: list[fx.Node]
    value_outputs: list[int]
    staged_outputs: dict[int, int]
    diagnostics: list[Diagnostic]


def prepare_graph(
    gm: fx.GraphModule,
    infos: Mapping[tuple[str, str], MarkInfo],
    leaf_names: Sequence[str],
    *,
    reads: bool = False,
    sources: Sequence[Source] = (),
    padding: str = "both",
) -> Prepared:
    """Run all passes but the last. None of them generates the code of the graph: `recompile()` it to run it.

    Args:
        reads: let host reads be; for graphs that are not captured.
        sources: inputs whose padding is followed, beside that of marked values.
        padding: where that of marked values can lie.

    Raises:
        HostReadError: SG401, for host reads that feed more than assertions.
        DeclarationError: SG109, for values that are overwritten or outputs whose spans are not clear.
    """
    gm = hoist_marks(gm)
    gm = erase_assertions(gm)
    gm = gm if reads else refuse_host_reads(gm)
    marks = find_marks(gm, infos)
    marked = [Source(m.value, m.full_name, m.info.span.dims, padding) for m in marks if m.info.span is not None]
    warnings = diagnose_leaks(gm, [*sources, *marked]) + diagnose_kept_spans(gm, marks)
    gm, marks = snapshot_spans(gm, marks)
    gm = deliver_values(gm, marks)
    cuts, diagnostics = plan_cuts(gm, marks, leaf_names)
    whole = {(found.rule, found.where) for found in diagnostics}
    diagnostics += [found for found in warnings if (found.rule, found.where) not in whole]
    delivered = result_nodes(gm.graph)
    value_outputs = [-1 if mark.spans is None else delivered.index(mark.value) for mark in marks]
    staged = {mark.staged: i for i, mark in enumerate(marks)}
    staged_outputs = {output: staged[node] for output, node in enumerate(delivered) if node in staged}
    gm = erase_marks(gm, marks)
    gm = isolate_outputs(gm)
    return Prepared(gm, marks, cuts, result_nodes(gm.graph), value_outputs, staged_outputs, diagnostics)
