"""Which pattern suits which head, from a few sampled query rows."""

from cinetile.routing.probes import svg_probe_masks
from cinetile.routing.route import HeadRoutes, route_heads

__all__ = ["HeadRoutes", "route_heads", "svg_probe_masks"]
