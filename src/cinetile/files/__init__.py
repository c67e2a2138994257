"""Reading files that nobody vouches for, within limits, and writing files whole or not at all.

Every reader refuses what is too large, too deep, ambiguous or not plain data, and reports it as
`FileError` (a ValueError): "FILE: what is wrong; expected what".
"""

from cinetile.files.arrays import ArrayFile, ArrayHeader, open_npz
from cinetile.files.documents import read_json, read_object, read_yaml
from cinetile.files.faults import FileError, reading
from cinetile.files.shards import shard_path
from cinetile.files.tensors import open_safetensors
from cinetile.files.writing import replace_file, require_writable

__all__ = [
    "ArrayFile",
    "ArrayHeader",
    "FileError",
    "open_npz",
    "open_safetensors",
    "read_json",
    "read_object",
    "read_yaml",
    "reading",
    "replace_file",
    "require_writable",
    "shard_path",
]
