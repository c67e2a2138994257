"""Printing a ladder in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cinetile.cli.circumstances import kernel_name, machine_facts, workload_facts
from cinetile.cli.output import facts, numbers
from cinetile.cli.tables import Numbers
from cinetile.cli.wording import counted, milliseconds, percent
from cinetile.lab.bench import LadderResult, LadderRow, RivalRow

# Columns to leave out on a narrow terminal, in this order.
_EXPENDABLE = ("min to max", "vs dense", "vs exact", "max error")


def print_ladder(console: Console, result: LadderResult) -> None:
    """Prints the measurements, the machine and workload, and a summary."""
    console.print(_circumstances(result))
    console.print(_measurements(result))
    if result.overheads:
        console.print(_overheads(result))
    console.print(summarise(result))
    console.print()
    console.print(_mask_errors(result))
    console.print(
        "relative change of the exact output, the same for every kernel; "
        "exact: the mask's own pairs, aligned: whole tiles",
        style="dim",
    )


def _circumstances(result: LadderResult) -> Table:
    workload, first = result.workload, result.rows[0]
    return facts(
        [
            ("input", result.input),
            *workload_facts(workload),
            (
                "tiles",
                f"{workload.block_q} queries x {workload.block_kv} keys, "
                f"rounding {workload.rounding}",
            ),
            ("kernel", kernel_name(first.implementation, first.path)),
            *machine_facts(
                result.machine, *(f"torch {measured.version}" for measured in result.rivals[:1])
            ),
            (
                "method",
                f"median of {counted(result.repeats, 'interleaved round')} after a warm-up; "
                f"errors on {result.checked_rows} query rows against float64",
            ),
        ]
    )


def _measurements(result: LadderResult) -> Numbers:
    cells = [(row, _cells(row)) for row in (*result.rows, *result.rivals)]
    table = numbers("", *cells[0][1], expendable=_EXPENDABLE)
    for row, cell in cells:
        name, style = (row.mode, None) if isinstance(row, LadderRow) else (row.name, "dim")
        table.add_row(name, *cell.values(), style=style)
    return table


def _overheads(result: LadderResult) -> Numbers:
    table = numbers("besides attention", "time", "min to max", "of aligned")
    table.add_text_column("note")
    for row in result.overheads:
        share = "-" if row.share_of_aligned is None else percent(row.share_of_aligned)
        spread = f"{milliseconds(row.ms_min)} to {milliseconds(row.ms_max)}"
        table.add_row(row.mode, milliseconds(row.ms_median), spread, share, row.note)
    return table


def _cells(row: LadderRow | RivalRow) -> dict[str, str]:
    visited = masked = "-"
    if isinstance(row, LadderRow):
        visited, masked = f"{row.tiles_visited:,} of {row.tiles_total:,}", f"{row.tiles_masked:,}"
    return {
        "time": milliseconds(row.ms_median),
        "min to max": f"{milliseconds(row.ms_min)} to {milliseconds(row.ms_max)}",
        "speed-up": "-" if row.speedup_vs_dense is None else f"{row.speedup_vs_dense:.2f}x",
        "pairs kept": percent(row.kept_fraction),
        "tiles visited": visited,
        "masked": masked,
        "max error": f"{row.max_abs_error:.1e}",
        "rel. error": f"{row.rel_error:.1e}",
        "vs exact": f"{row.rel_error_vs_exact:.1e}",
        "vs dense": f"{row.rel_error_vs_dense:.1e}",
    }


def summarise(result: LadderResult) -> str:
    """Returns a sentence on the fastest mode, and a second sentence if the run has rivals."""
    dense = result.row("dense")
    sparse = [row for row in result.rows if row.mode != "dense"]
    if dense is None or not sparse:
        fastest = min(result.rows, key=lambda row: row.ms_median)
        sentence = f"{fastest.mode.capitalize()} attention took {milliseconds(fastest.ms_median)}."
        return sentence + beside_rivals(fastest, result.rivals)
    best = min(sparse, key=lambda row: row.ms_median)
    return _beside_dense(result, best, dense) + beside_rivals(best, result.rivals)


def beside_rivals(best: LadderRow, rivals: Sequence[RivalRow]) -> str:
    """Returns the sentence that compares the fastest row with each rival; empty without rivals.

    The sentence gives a ratio to a rival only if the row has a stated speed-up and the two
    ranges of times do not overlap.
    """
    parts = []
    for rival in rivals:
        part = f"{rival.name} took {milliseconds(rival.ms_median)}"
        apart = rival.ms_min > best.ms_max or best.ms_min > rival.ms_max
        if apart and best.speedup_vs_dense is not None:
            part += f", {rival.ms_median / best.ms_median:.2f} times as long"
        parts.append(part)
    return f" In the same run {' and '.join(parts)}." if parts else ""


def _beside_dense(result: LadderResult, best: LadderRow, dense: LadderRow) -> str:
    took = (
        f"{best.mode.capitalize()} attention took {milliseconds(best.ms_median)} where dense "
        f"took {milliseconds(dense.ms_median)}"
    )
    if best.speedup_vs_dense is None:
        return f"{took}; no speed-up is stated: {best.no_speedup_reason}."
    took += f", {_pace(best)}, by computing {percent(best.kept_fraction)} of the pairs"
    if best.mode != "aligned":
        return f"{took}: exactly those of the mask."
    change = result.mask_errors[0].aligned_vs_exact
    split = result.row("split")
    exact = ""
    if split is not None and split.speedup_vs_dense is not None:
        exact = f" (split, which keeps exactly those: {_pace(split)})"
    return (
        f"{took}; it keeps whole tiles and not exactly the mask's pairs, which changes the "
        f"output by {percent(change)}{exact}."
    )


def _pace(row: LadderRow) -> str:
    return f"{row.speedup_vs_dense:.2f} times as fast"


def _mask_errors(result: LadderResult) -> Numbers:
    table = numbers(
        "what the mask changes", "aligned vs exact", "exact vs dense", "aligned vs dense"
    )
    for errors in result.mask_errors:
        table.add_row(
            errors.input,
            percent(errors.aligned_vs_exact),
            percent(errors.exact_vs_dense),
            percent(errors.aligned_vs_dense),
        )
    return table
