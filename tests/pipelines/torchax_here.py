"""torchax, made to import beside a PyTorch that is newer than it.

torchax 0.0.13 keeps tables of operators, and some of those that it names are gone from PyTorch
2.13: those of named tensors, and one more. Nothing calls them. Declared without an implementation,
they let torchax import as it is published.
"""

import torch
from torch import library

GONE = (
    "all.dimname",
    "all.dimname_out",
    "index_add.dimname",
    "index_copy.dimname",
    "index_copy_.dimname",
    "index_fill.Dimname_Scalar",
    "index_fill.Dimname_Tensor",
    "index_fill_.Dimname_Scalar",
    "index_fill_.Dimname_Tensor",
    "max_pool3d_backward",
    "norm.names_ScalarOpt_dim",
    "norm.names_ScalarOpt_dim_dtype",
    "norm.names_dtype_out",
    "norm.names_out",
    "prod.dim_Dimname",
    "std.correction_names",
    "std.correction_names_out",
    "std.names_dim",
    "std.names_out",
    "std_mean.correction_names",
    "std_mean.names_dim",
    "unbind.Dimname",
)


def _is_there(name: str) -> bool:
    operator, _, overload = name.partition(".")
    return hasattr(torch.ops.aten, operator) and (
        not overload or hasattr(getattr(torch.ops.aten, operator), overload)
    )


# Kept: what a library declares is gone when it is.
DECLARED = library.Library("aten", "FRAGMENT")
for _name in GONE:
    if not _is_there(_name):
        DECLARED.define(f"{_name}(Tensor self) -> Tensor")

import torchax  # noqa: E402

__all__ = ["torchax"]
