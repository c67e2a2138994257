"""Dense and sparse attention side by side: speed, and what it costs in quality."""
