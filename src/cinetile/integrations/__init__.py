"""Sparse attention inside other libraries: one package per library, none imports another."""
