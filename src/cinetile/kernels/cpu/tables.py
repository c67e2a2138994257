"""Tile plans as the flat tables that the native kernel reads."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8

from cinetile.grid import TokenOrder
from cinetile.plans import TilePlan

_NONE = -1


@dataclass(frozen=True, eq=False)
class FlatTables:
    """The tables of several plans, one after the other; native/plan_tables.h reads them.

    Attributes:
        header: a row of sizes and places in the other tables for each plan.
        row_starts: where the tiles of each query tile start, and the end of the last one.
        tile_kv: key tile of each visited tile.
        tile_kind: kind of each visited tile; 0 needs no mask.
        edges: prefix, low and high of each row, for each set of edges.
        orders: frame-major position of the token at each placed position, for each order.
    """

    header: Int[np.ndarray, "plans columns"]
    row_starts: Int[np.ndarray, " starts"]
    tile_kv: Int[np.ndarray, " tiles"]
    tile_kind: UInt8[np.ndarray, " tiles"]
    edges: Int[np.ndarray, "sets 3 tokens"]
    orders: Int[np.ndarray, "orders tokens"]


def flatten_plans(plans: tuple[TilePlan, ...]) -> FlatTables:
    """Puts the tables of plans on one grid one after the other; equal edges and orders once."""
    grid = plans[0].grid
    edges: dict[object, int] = {}
    orders: dict[TokenOrder, int] = {}
    edge_tables, order_tables, header = [], [], []
    num_starts = num_tiles = 0

    def order_index(order: TokenOrder) -> int:
        if order.is_frame_major(grid):
            return _NONE
        if order not in orders:
            orders[order] = len(orders)
            order_tables.append(order.indices(grid))
        return orders[order]

    def edge_index(plan: TilePlan) -> int:
        if not plan.is_exact:
            return _NONE  # masked tiles keep every key that exists
        if plan.mask not in edges:
            edges[plan.mask] = len(edges)
            edge_tables.append(np.stack(plan.row_edges()))
        return edges[plan.mask]

    for plan in plans:
        header.append(
            (
                plan.block_q,
                plan.block_kv,
                plan.mode != "naive",  # a naive plan is run as it stands, to be measured
                num_starts,
                plan.geometry.num_q_tiles,
                num_tiles,
                plan.tile_kv.size,
                edge_index(plan),
                order_index(plan.mask.query_order),
                order_index(plan.mask.key_order),
                *plan.mask.key_order.text_range(grid),
            )
        )
        num_starts += plan.row_starts.size
        num_tiles += plan.tile_kv.size
    return FlatTables(
        header=np.array(header, np.int32),
        row_starts=np.concatenate([plan.row_starts for plan in plans]),
        tile_kv=np.concatenate([plan.tile_kv for plan in plans]),
        tile_kind=np.concatenate([plan.tile_kind for plan in plans]),
        edges=np.array(edge_tables, np.int32).reshape(-1, 3, grid.num_tokens),
        orders=np.array(order_tables, np.int32).reshape(-1, grid.num_tokens),
    )
