"""Tile sizes that were found to be fast, kept beside this file; `cinetile tune` finds them."""

import functools
import json
from importlib.resources import files
from typing import Any

_PACKAGE = "cinetile.kernels.cpu"
_TABLE = "tuned_blocks.json"


def tuned_blocks(path: str, dtype: str, num_tokens: int) -> tuple[int, int]:
    """The `block_q` and `block_kv` for a path, a dtype and a sequence of about this length.

    Of the lengths that were tuned, the nearest by ratio counts. Where nothing was tuned
    the entry "default" counts. float16 arrays run through the code of float32 and have its sizes.
    """
    entries = _load()["blocks"]
    tuned_dtype = "float32" if dtype == "float16" else dtype
    by_length = entries.get(path, {}).get(tuned_dtype) or entries["default"][tuned_dtype]
    length = min(
        by_length,
        key=lambda measured: max(int(measured), num_tokens) / min(int(measured), num_tokens),
    )
    block_q, block_kv = by_length[length]
    return block_q, block_kv


@functools.cache
def _load() -> dict[str, Any]:
    return json.loads(files(_PACKAGE).joinpath(_TABLE).read_text("utf-8"))
