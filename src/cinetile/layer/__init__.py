"""A policy resolved on a token grid: plans, levels, routes, records, `SparseAttention`."""
