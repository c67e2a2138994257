"""Wan text-to-video."""
