"""The library's own patterns: near frames, and the same place in other frames."""

from cinetile.masks import spatial_mask, temporal_mask
from cinetile.patterns.pattern import Pattern
from cinetile.patterns.upstream import spatial_probe, temporal_probe

SPATIAL = Pattern("spatial", spatial_mask, spatial_probe)
TEMPORAL = Pattern("temporal", temporal_mask, temporal_probe)
