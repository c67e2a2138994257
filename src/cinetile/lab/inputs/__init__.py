"""Query, key and value arrays to measure attention on: random, from a file, from a video clip.

Random normal inputs hide how real ones behave: their attention is nearly uniform. A clip gives
inputs whose attention follows the picture, without a model or a download.
"""

from cinetile.lab.inputs.arrays import Inputs, random_inputs
from cinetile.lab.inputs.clip import clip_inputs
from cinetile.lab.inputs.files import load_qkv
from cinetile.lab.inputs.stacks import SavedCall, find_calls
from cinetile.models.video import sample_clip

__all__ = [
    "Inputs",
    "SavedCall",
    "clip_inputs",
    "find_calls",
    "load_qkv",
    "random_inputs",
    "sample_clip",
]
