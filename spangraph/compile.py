"""`spangraph.compile`: a model whose steps return at once and are cut after they are done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from spangraph.backends import Backend
from spangraph.declare import find_declarations
from spangraph.errors import InputError
from spangraph.slots import Copy
from spangraph.stops import RowValues, StopCheck

if TYPE_CHECKING:
    from spangraph.compiled import Compiled
    from spangraph.pipeline import Pipeline
    from spangraph.report import Report


@dataclass(frozen=True)
class Walk:
    """Options of one walk: an entry of `walks=`. What is None is as `compile` says for all walks.

    Args:
        buckets, dims, pad_values, copies: see `spangraph.compile`.
    """

    buckets: Mapping[str, Sequence[int]] | None = None
    dims: Mapping[str, Mapping[int, str]] | None = None
    pad_values: Mapping[str, float | int | bool] | None = None
    copies: Mapping[str, Copy | str] | None = None

    def with_defaults(self, common: Walk) -> Walk:
        """These options, and those of `common` where they are None."""
        return replace(common, **{f.name: own for f in fields(self) if (own := getattr(self, f.name)) is not None})


def compile(
    model: nn.Module,
    *,
    walk: str = "forward",
    walks: Mapping[str, Walk | str] | Sequence[str] | None = None,
    depth: int = 1,
    copies: Mapping[str, Copy | str] | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, Mapping[int, str]] | None = None,
    pad_values: Mapping[str, float | int | bool] | None = None,
    on_miss: str = "eager",
    max_graphs: int | None = None,
    on_stale: str = "error",
    trace: str = "auto",
    backend: Backend | torch.device | str | None = None,
    verify: str = "error",
    staging: str = "kernel",
    wait: str = "block",
    generators: Sequence[torch.Generator] = (),
    pipeline: Pipeline | None = None,
    stop_check: Callable[[RowValues], StopCheck] | None = None,
) -> Compiled:
    """Wrap a model with spanned outputs so that its steps run without a host read and its rows are cut afterwards.

    Each input signature (shapes, dtypes, devices, non-tensor constants) is traced and captured at its first launch, or
    in `warmup()`; with `buckets=` shapes are first padded to few. The model must neither run elsewhere nor be changed
    meanwhile.

    Tensors change from step to step; what Python computes at the trace does not (`random`, clocks). State that the
    forward keeps on the host (a counter, a list, a tensor bound to an attribute) is noticed: inline such a model runs
    opaquely, and where steps are captured it is refused, as is one that writes its inputs in place.

    Args:
        model: declares its spanned outputs (`spanned_outputs`, or `spangraph.declare`). Switch to eval mode yourself.
        walk: the execution path, given to `spanned_outputs(walk)`, and to the forward if it has a parameter `walk`.
        walks: several paths, for `launch(walk=...)`: names; or name -> `Walk` with options of its own, or -> the name
            of another walk, of which it is an alias: both replay the same graphs. `walk` is then the default.
        depth: steps that may be open or leased at once. On a captured backend a signature has one graph per step of
            depth, each with memory of its own; but one alone, in a pool with those of other signatures, if all its
            outputs are copied (spans and row values are, too).
        copies: how long rows live, and where: declared name -> `"view"` (the default: until the step's release, in the
            graph's output), `"device"`, `"host"`, or a `Copy`. It holds for all outputs that are cut by that name;
            a cast for the declared value alone, and views and copies of it.
        buckets: sizes of named input dims, `{"batch": (1, 2, 4, 8), "frames": (50, 100, 200)}`: a launch takes the
            smallest that fits and pads its inputs. `"batch"` is the rows: those that were added never surface, and
            whole outputs of as many rows as the bucket are cut to the real ones, but for a table, which an export shows
            to depend on no input. Other dims stay padded, up to spans.
        dims: which dims of which inputs these are: path of an input -> dim -> name, `{"mel": {0: "batch", 2: "frames"},
            "lengths": {0: "batch"}}`. By default dim 0 of every tensor is `"batch"`.
        pad_values: path of an input -> what its padding holds, default 0.
        on_miss: what becomes of a launch that fits no bucket: `"eager"` runs the model as it is and cuts the same
            outputs, `"error"` refuses it.
        max_graphs: graphs that may be had at once, over all walks; for one more, those of the signature that was not
            used for longest are dropped, once the device is done. By default there is no limit.
        on_stale: what to do when a parameter or buffer was replaced since the trace: `"error"`, or `"recapture"`.
        trace: `"export"`, `"dynamo"` (in one graph; when an attribute or global that the forward has read changes, the
            model is traced again, and both graphs are kept), `"opaque"` (the model is one leaf of the graph), or
            `"auto"`: export, else opaque, with the reason in `explain()`.
        backend: a device, a backend, or the name of a `torch.compile` backend, such as `"inductor"`, which compiles
            graphs up to their tail; default the device of the model's parameters. On CPU, steps run inline.
        verify: what to do about host reads that stay in the graph: `"error"` refuses them with file:line, `"warn"`
            runs the model uncaptured, `"off"` does so silently. The same for conflicts in `pipeline`. Warnings, as of
            padding that may leak, are in `explain()`; `spangraph.verify` checks more.
        staging: `"kernel"`, or `"copy"` for the plain async copy.
        wait: how waits wait: `"block"`, `"spin"`, or `"header"` (poll the slot's header).
        generators: device generators that the model draws from, to be registered with its graphs.
        pipeline: the pipeline that the model is a node of, to be checked on its walks.
        stop_check: a function of a step's row values (row id -> name -> an int, or a tuple of ints; real rows only)
            that returns a `StopCheck`. It runs on the host, once per step that is read, in the thread that waits for
            the step first, before anything is delivered; see `Step.stops`. Where it raises, that wait does, and the
            next one runs it again. It may use these values, and no step.

    Raises:
        InputError: for an option out of range, a `torch.compile` backend that captures CUDA graphs itself, a forward
            whose parameter is called like an option of `launch`, or a pipeline that the model is no node of.
        DeclarationError: for copies of what the model does not declare, or that do not fit a float output.
        VerificationError: for speculation conflicts in the pipeline, all of them.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"compile() got {type(model).__name__}: expected an nn.Module.")
    from spangraph.compiled import Compiled  # tracer and passes, which importing spangraph does without

    common = Walk(buckets, dims, pad_values, copies)
    options, aliases = _walks_of(walk, walks, common)
    for name in options if pipeline is not None and verify != "off" else ():
        report = _verified(pipeline, model, name)
        if verify == "error":
            report.raise_for_errors()
        elif report.errors:
            warnings.warn(f"the pipeline has conflicts:\n{report}", stacklevel=2)
    return Compiled(
        model,
        walk,
        options,
        aliases,
        depth=depth,
        on_miss=on_miss,
        max_graphs=max_graphs,
        on_stale=on_stale,
        trace=trace,
        backend=backend,
        verify=verify,
        staging=staging,
        wait=wait,
        generators=tuple(generators),
        stop_check=stop_check,
    )


def _walks_of(
    walk: str, walks: Mapping[str, Walk | str] | Sequence[str] | None, common: Walk
) -> tuple[dict[str, Walk], dict[str, str]]:
    """Options of each walk, and what other names walks have."""
    if walks is None:
        return {walk: common}, {}
    if isinstance(walks, str) or not isinstance(walks, Mapping | Sequence) or not walks:
        raise InputError(f"walks={walks!r}: expected names, or name -> Walk or the name of another walk.")
    given = walks if isinstance(walks, Mapping) else dict.fromkeys(walks, Walk())
    options, aliases = {}, {}
    for name, what in given.items():
        if isinstance(what, Walk):
            options[name] = what.with_defaults(common)
        elif isinstance(what, str) and isinstance(given.get(what), Walk):
            aliases[name] = what
        else:
            raise InputError(
                f"walks[{name!r}] is {what!r}: expected a Walk, or the name of another walk that is one"
                f" ({sorted(n for n, w in given.items() if isinstance(w, Walk))})."
            )
    return options, aliases


def _verified(pipeline: Pipeline | None, model: nn.Module, walk: str) -> Report:
    from spangraph.pipeline import Pipeline

    if not isinstance(pipeline, Pipeline):
        raise InputError(
            f"pipeline is a {type(pipeline).__name__}: expected a Pipeline (Pipeline.from_toml reads one)."
        )
    declared = {name for declaration in find_declarations(model, walk) for name in declaration.spans}
    if not any(node.module is model or set(node.spanned_outputs(walk)) == declared for node in pipeline.nodes):
        raise InputError(
            f"no node of the pipeline is this model: expected one with module=model, or one whose spanned outputs on"
            f" walk {walk!r} are {sorted(declared)}."
        )
    return pipeline.verify(walk)
