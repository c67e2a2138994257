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
from cinetile.layer.record import LayerRecord
from cinetile.routing import HeadRoutes

_PLACE = ("step", "layer", "batch", "head")


@dataclass(frozen=True)
class RouteTable:
    """Routes of a model run in JAX or PyTorch, or of saved arrays.

    Attributes:
        patterns: names of what heads could be routed to, in the order of the errors.
        entries: one dictionary per head of each call, as `LayerRecord.rows` returns them.
    """

    patterns: tuple[str, ...]
    entries: tuple[dict[str, Any], ...]

    @staticmethod
    def from_records(records: Iterable[LayerRecord]) -> "RouteTable":
        """Collects the records of calls; they may be stacked, as by `jax.lax.scan`.

        Args:
            records: what `SparseAttention` returned, or the `calls` of a diffusers summary.

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
        return RouteTable(patterns, tuple(row for record in records for row in record.rows()))

    @staticmethod
    def from_routes(
        found: HeadRoutes, choices: tuple[PlanChoice, ...], *, step: int = 0, layer: int = 0
    ) -> "RouteTable":
        """Returns the table of one `route_heads` call.

        Args:
            found: what it returned.
            choices: what its masks are.
            step: index of the denoising step.
            layer: index of the layer.
        """
        record = LayerRecord(
            np.asarray(found.routes),
            np.asarray(found.errors),
            np.asarray(False),
            np.asarray(step),
            np.asarray(layer),
            choices,
            tuple(choice.pattern for choice in choices),
        )
        return RouteTable.from_records([record])

    @staticmethod
    def joined(tables: Iterable["RouteTable"]) -> "RouteTable":
        """Returns one table of all rows, by step, layer, batch row and head.

        Raises:
            ValueError: there are no tables, or their patterns differ.
        """
        tables = list(tables)
        if not tables or any(table.patterns != tables[0].patterns for table in tables):
            raise ValueError("tables must be at least one, and all of the same patterns")
        rows = [row for table in tables for row in table.entries]
        rows.sort(key=lambda row: tuple(row[name] for name in _PLACE))
        return RouteTable(tables[0].patterns, tuple(rows))

    @property
    def steps(self) -> tuple[int, ...]:
        """Indices of the denoising steps that occur."""
        return tuple(sorted({row["step"] for row in self.entries}))

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that occur."""
        return tuple(sorted({row["layer"] for row in self.entries}))

    def calls(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """Returns the rows of each step and layer."""
        calls: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in self.entries:
            calls.setdefault((row["step"], row["layer"]), []).append(row)
        return calls

    def median_errors(self, rows: Iterable[dict[str, Any]]) -> Float[np.ndarray, " patterns"]:
        """Returns the median over heads of each pattern's error; NaN where nothing was sampled."""
        errors = [list(row["errors"].values()) for row in rows if row["errors"] is not None]
        if not errors:
            return np.full(len(self.patterns), math.nan)
        return np.median(np.array(errors), axis=0)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one flat dictionary per head, as JSON holds them."""
        return list(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as JSON holds it."""
        return {"patterns": list(self.patterns), "rows": self.rows()}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes one line for each head; errors are empty where the call was dense."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*_PLACE, "pattern", "density", *(f"error_{p}" for p in self.patterns)])
        for row in self.entries:
            place = [row[name] for name in _PLACE]
            errors = [""] * len(self.patterns) if row["errors"] is None else row["errors"].values()
            writer.writerow([*place, row["pattern"], row["density"], *errors])
        replace_file(path, lambda file: file.write(text.getvalue().encode()))
