"""Query, key and value arrays to measure attention on: random, from a file, from a video clip.

Random normal inputs hide how real ones behave: their attention is nearly uniform. A clip gives
inputs whose attention follows the picture, without a model or a download.
"""

from cinetile.inputs.arrays import Inputs, random_inputs
from cinetile.inputs.clip import clip_inputs
from cinetile.inputs.files import load_qkv
from cinetile.inputs.stacks import SavedCall, find_calls
from cinetile.inputs.video import sample_clip

__all__ = [
    "Inputs",
    "SavedCall",
    "clip_inputs",
    "find_calls",
    "load_qkv",
    "random_inputs",
    "sample_clip",
]
