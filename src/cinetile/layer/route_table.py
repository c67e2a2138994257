"""Routes of many calls as one table: which head went where, and what each pattern would cost."""

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cinetile.files import replace_file
from cinetile.layer.plans import PlanChoice
from cinetile.layer.record import RoutingRecord
from cinetile.routing import HeadRoutes

_PLACE = ("step", "layer", "batch", "head")


@dataclass(frozen=True)
class RouteEntry:
    """Where one head of one call went.

    Attributes:
        step: index of the denoising step.
        layer: index of the layer.
        batch: row of the batch.
        head: index of the head.
        choice: what it was routed to.
        errors: mean squared error of each of the table's patterns on the sampled rows; None where
            the call was dense and nothing was sampled.
    """

    step: int
    layer: int
    batch: int
    head: int
    choice: PlanChoice
    errors: tuple[float, ...] | None


@dataclass(frozen=True)
class RouteTable:
    """Routes of a model run, or of saved arrays.

    Attributes:
        patterns: what heads could be routed to, in the order of the errors.
        entries: one for each head of each call.
    """

    patterns: tuple[str, ...]
    entries: tuple[RouteEntry, ...]

    @staticmethod
    def from_records(records: Iterable[RoutingRecord]) -> "RouteTable":
        """Collects what `SparseAttention` recorded; records may be stacked, as by a scan.

        Raises:
            ValueError: there are no records, or they are of policies with different patterns.
        """
        records = list(records)
        if not records:
            raise ValueError("records must hold at least one record, got none")
        patterns = records[0].patterns
        for record in records:
            if record.patterns != patterns:
                raise ValueError(f"records must have one set of patterns, got {record.patterns}")
        entries = [
            RouteEntry(
                **{name: row[name] for name in _PLACE},
                choice=PlanChoice(row["pattern"], row["density"]),
                errors=None if row["errors"] is None else tuple(row["errors"].values()),
            )
            for record in records
            for row in record.rows()
        ]
        return RouteTable(patterns, tuple(entries))

    @staticmethod
    def from_routes(
        found: HeadRoutes, choices: tuple[PlanChoice, ...], *, step: int = 0, layer: int = 0
    ) -> "RouteTable":
        """The table of one `route_heads` call.

        Args:
            found: what it returned.
            choices: what its masks are.
            step: index of the denoising step.
            layer: index of the layer.
        """
        routes, errors = np.asarray(found.routes), np.asarray(found.errors)
        entries = [
            RouteEntry(
                step,
                layer,
                row,
                head,
                choices[int(routes[row, head])],
                tuple(map(float, errors[row, head])),
            )
            for row, head in np.ndindex(routes.shape)
        ]
        return RouteTable(tuple(choice.pattern for choice in choices), tuple(entries))

    @staticmethod
    def joined(tables: Iterable["RouteTable"]) -> "RouteTable":
        """One table of all entries, by step, layer, batch row and head.

        Raises:
            ValueError: there are no tables, or their patterns differ.
        """
        tables = list(tables)
        if not tables or any(table.patterns != tables[0].patterns for table in tables):
            raise ValueError("tables must be at least one, and all of the same patterns")
        entries = [entry for table in tables for entry in table.entries]
        entries.sort(key=lambda entry: (entry.step, entry.layer, entry.batch, entry.head))
        return RouteTable(tables[0].patterns, tuple(entries))

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({entry.step for entry in self.entries}))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({entry.layer for entry in self.entries}))

    def calls(self) -> dict[tuple[int, int], list[RouteEntry]]:
        """The entries of each step and layer."""
        calls: dict[tuple[int, int], list[RouteEntry]] = {}
        for entry in self.entries:
            calls.setdefault((entry.step, entry.layer), []).append(entry)
        return calls

    def median_errors(self, entries: Iterable[RouteEntry]) -> Float[np.ndarray, " patterns"]:
        """Median over heads of each pattern's error; NaN where nothing was sampled."""
        errors = [entry.errors for entry in entries if entry.errors is not None]
        if not errors:
            return np.full(len(self.patterns), math.nan)
        return np.median(np.array(errors), axis=0)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary for each head, as in JSON."""
        return [
            {
                **{name: getattr(entry, name) for name in _PLACE},
                "pattern": entry.choice.pattern,
                "density": entry.choice.density,
                "errors": None
                if entry.errors is None
                else dict(zip(self.patterns, entry.errors, strict=True)),
            }
            for entry in self.entries
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"patterns": list(self.patterns), "rows": self.rows()}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes one line for each head; errors are empty where the call was dense."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        errors = [f"error_{pattern}" for pattern in self.patterns]
        writer.writerow([*_PLACE, "pattern", "density", *errors])
        for entry in self.entries:
            place = [getattr(entry, name) for name in _PLACE]
            values = entry.errors or [""] * len(errors)
            writer.writerow([*place, entry.choice.pattern, entry.choice.density, *values])
        replace_file(path, lambda file: file.write(text.getvalue().encode()))
