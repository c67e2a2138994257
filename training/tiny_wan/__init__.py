"""The small Wan checkpoint: its videos, caption check, model, training and evaluation."""
