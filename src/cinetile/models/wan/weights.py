"""Loading safetensors by name into a model; all of it or an error that names the tensor."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from cinetile import _checks
from cinetile.files import ArrayFile, open_safetensors, reading, shard_path
from cinetile.models.wan.config import read_json
from cinetile.models.wan.layers import pack_layers

Model = TypeVar("Model")

# What a part holds is only ever read.
Config_co = TypeVar("Config_co", covariant=True)
Model_co = TypeVar("Model_co", covariant=True)

# Puts a parameter, by its name and value, where it is to be.
Put = Callable[[str, Any], Array]

_DTYPES = ("float32", "bfloat16", "float16")
_LISTED = 3


class Part(Generic[Config_co, Model_co]):
    """A model of a pipeline, loaded when it is first asked for.

    Args:
        config: its configuration.
        dtype: what it computes in.
        load: loads it, its parameters placed by the function that it is given.

    Attributes:
        config: as given.
        dtype: as given.
    """

    def __init__(self, config: Config_co, dtype: str, load: Callable[[Put], Model_co]) -> None:
        self.config = config
        self.dtype = dtype
        self._load = load
        self._put: Put = put_on_default_device
        self._model: Model_co | None = None

    def place_by(self, put: Put) -> None:
        """Sets where the parameters will be; call it before `get`."""
        self._put = put

    def get(self) -> Model_co:
        """The model."""
        if self._model is None:
            self._model = self._load(self._put)
        return self._model

    def release(self) -> None:
        """Frees the memory of a model that was loaded from files; it will be loaded again."""
        self._model = None


def put_on_default_device(name: str, value: Any) -> Array:
    """Puts a parameter where JAX puts arrays by itself."""
    del name
    return jnp.asarray(value)


def put_all(put: Put, model: Model) -> Model:
    """Puts all parameters of a model."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: put(".".join(_parts(path)), leaf), model
    )


def _parts(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(entry, "name", getattr(entry, "idx", entry))) for entry in path]


class WeightFiles:
    """The tensors of one model folder: names, shapes and dtypes; data only when it is asked for.

    Args:
        folder: holds `<stem>.safetensors`, or `<stem>.safetensors.index.json` and its shards.
        tied: a name that a tensor may have instead of, or besides, the one that is used.

    Attributes:
        folder: as given.
        shapes: shape of every tensor by its name.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ImportError: safetensors is not installed.
        ValueError: a file is truncated or damaged, or the index and the shards disagree.
    """

    _STEMS = ("diffusion_pytorch_model", "model")

    def __init__(
        self, folder: str | os.PathLike[str], tied: Mapping[str, str] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        index = self._index()
        for path in dict.fromkeys(index.values()) if index else [self._single()]:
            self._read_header(path)
        for name, path in index.items():
            if self._files.get(name) != path:
                raise ValueError(f"{path}: tensor {name!r} is missing, but the index lists it here")
        if index:
            _refuse(self.folder, {"not in the index": set(self._files) - set(index)})
        self._stored = {name: name for name in self._files}
        for other, used in (tied or {}).items():
            if other in self._stored:
                shape, dtype = self.shapes.pop(other), self._dtypes.pop(other)
                self._stored.pop(other)
                if used not in self._stored:
                    self.shapes[used], self._dtypes[used] = shape, dtype
                    self._files[used], self._stored[used] = self._files[other], other

    def _index(self) -> dict[str, Path]:
        """The shard of each tensor; empty where there is no index."""
        for stem in self._STEMS:
            path = self.folder / f"{stem}.safetensors.index.json"
            if path.is_file():
                shards = read_json(path).get("weight_map")
                with reading(path, "an index of safetensors files"):
                    if not isinstance(shards, dict) or not shards:
                        raise ValueError("weight_map must name the shard of each tensor")
                    return {name: shard_path(self.folder, shard) for name, shard in shards.items()}
        return {}

    def _single(self) -> Path:
        for stem in self._STEMS:
            path = self.folder / f"{stem}.safetensors"
            if path.is_file():
                return path
        names = " or ".join(f"{stem}.safetensors" for stem in self._STEMS)
        raise FileNotFoundError(f"{self.folder} holds no weights: no {names}, nor an index of it")

    def _read_header(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, but the index names it")
        with ExitStack() as stack:
            for name, header in _open(path, stack).headers.items():
                if name in self._files:
                    raise ValueError(
                        f"{path}: tensor {_checks.shown(name)} is in {self._files[name].name} too"
                    )
                self.shapes[name], self._dtypes[name] = header.shape, header.dtype
                self._files[name] = path

    @property
    def compute_dtype(self) -> str:
        """The dtype that most parameters are stored in: "bfloat16", or "float32" for all others."""
        sizes = {True: 0, False: 0}
        for name, dtype in self._dtypes.items():
            sizes[dtype == "bfloat16"] += math.prod(self.shapes[name])
        return "bfloat16" if sizes[True] > sizes[False] else "float32"

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Compares the tensors with those that a model has.

        Raises:
            ValueError: one is missing, unknown, of another shape or not floating point.
        """
        _refuse(
            self.folder,
            {
                "missing": set(wanted) - set(self.shapes),
                "unknown": set(self.shapes) - set(wanted),
            },
        )
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                raise ValueError(
                    f"{self._files[name]}: tensor {name!r} has shape {self.shapes[name]}, "
                    f"wanted {shape}"
                )
            if self._dtypes[name] not in _DTYPES:
                raise ValueError(
                    f"{self._files[name]}: tensor {name!r} has dtype {self._dtypes[name]}, "
                    f"wanted one of {', '.join(_DTYPES)}"
                )

    def read(self, names: Iterable[str]) -> Iterator[Shaped[np.ndarray, "..."]]:
        """Yields tensors in the stored dtype, one in memory at a time."""
        with ExitStack() as stack:
            opened: dict[Path, ArrayFile] = {}
            for name in names:
                path = self._files[name]
                if path not in opened:
                    opened[path] = _open(path, stack)
                yield opened[path].read(self._stored[name])


def load_model(
    build: Callable[[], Model],
    files: WeightFiles,
    *,
    stacked: str,
    renames: Mapping[str, str],
) -> Callable[[Put], Model]:
    """Checks that files hold the parameters of a model, and returns what loads them.

    Args:
        build: makes the model with any values; only its shapes and dtypes are used.
        files: where the values are.
        stacked: field of the model whose parameters have a leading layer axis; the files hold
            each layer by itself, with its number after this name. "" for none.
        renames: pieces of parameter names here, and what the files say instead.

    Returns:
        A function that reads the values, casting each tensor by itself, puts each where it is
        told to, and returns the model with its layers packed (`pack_layers`).

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
    """
    template = eqx.filter_eval_shape(build)
    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    plan: list[tuple[bool, str, list[str], Any]] = []
    wanted: dict[str, tuple[int, ...]] = {}
    for path, leaf in leaves:
        parts = _parts(path)
        is_stacked = parts[0] == stacked
        if is_stacked:
            names = [".".join([stacked, str(layer), *parts[1:]]) for layer in range(leaf.shape[0])]
            shape = leaf.shape[1:]
        else:
            names, shape = [".".join(parts)], leaf.shape
        names = [_renamed(name, renames) for name in names]
        plan.append((is_stacked, ".".join(parts), names, leaf))
        for name in names:
            wanted[name] = shape
    files.check(wanted)

    def load(put: Put) -> Model:
        values = []
        for is_stacked, own_name, names, leaf in plan:
            value = np.empty(leaf.shape, leaf.dtype)
            # One tensor at a time, so that a cast needs no copy of a whole model beside it.
            for place, tensor in zip(value.reshape(len(names), -1), files.read(names), strict=True):
                place[...] = tensor.reshape(-1)
            array = put(own_name, value)
            values.append(pack_layers(array) if is_stacked else array)
        return jax.tree_util.tree_unflatten(structure, values)

    return load


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    for ours, theirs in renames.items():
        name = name.replace(ours, theirs)
    return name


def _open(path: Path, stack: ExitStack) -> ArrayFile:
    archive = open_safetensors(
        path, "weights in safetensors", extra="wan", feature="reading weights"
    )
    return stack.enter_context(archive)


def _refuse(folder: Path, wrong: Mapping[str, set[str]]) -> None:
    """Raises ValueError if any kind of wrong names has some, and lists the first ones of each."""
    found = [f"{what}: {_listed(names)}" for what, names in wrong.items() if names]
    if found:
        raise ValueError(f"{folder}: {'; '.join(found)}")


def _listed(names: set[str]) -> str:
    listed = ", ".join(map(_checks.shown, sorted(names)[:_LISTED]))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"tensor {listed}{more}"
