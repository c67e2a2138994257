"""Whole video models, and what they are made of."""
