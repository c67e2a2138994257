"""Measuring, looking and estimating: nothing that attends imports it."""
