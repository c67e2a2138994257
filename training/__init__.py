"""How the checkpoints that ship with cinetile were made (development code; needs PyTorch)."""
