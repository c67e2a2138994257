"""The models of a pipeline: given or opened from a folder, and sharded over a mesh."""

import os
from typing import Any, TypeVar

from jax.sharding import Mesh, PartitionSpec

from cinetile import _checks
from cinetile.models.wan.folder import GenerationDefaults, PipelineParts, VideoCodec, open_folder
from cinetile.models.wan.schedulers import Scheduler
from cinetile.models.wan.sharding import WEIGHT_SHARDINGS, WeightSharding, place_weights
from cinetile.models.wan.text_encoder import UMT5EncoderModel
from cinetile.models.wan.tokenizer import PromptTokenizer
from cinetile.models.wan.transformer import WanTransformer3DModel
from cinetile.models.wan.weights import Part, Put, put_all, put_on_default_device
from cinetile.parallel.layout import array_layout, automatic

Models = TypeVar("Models", bound="WanModels")


class WanModels:
    """The models and defaults of a pipeline; see `WanPipeline` for the arguments."""

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        text_encoder: UMT5EncoderModel,
        transformer: WanTransformer3DModel,
        vae: VideoCodec,
        scheduler: Scheduler,
        transformer_2: WanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        defaults: GenerationDefaults | None = None,
        mesh: Mesh | None = None,
        sharding: PartitionSpec | None = None,
        weights: WeightSharding = "fsdp",
    ) -> None:
        self._set_layout(mesh, sharding)
        self._set_parts(
            PipelineParts(
                tokenizer=tokenizer,
                text_encoder=_loaded(text_encoder),
                transformer=_loaded(transformer),
                vae=_loaded(vae),
                scheduler=scheduler,
                transformer_2=None if transformer_2 is None else _loaded(transformer_2),
                boundary_ratio=boundary_ratio,
                defaults=GenerationDefaults() if defaults is None else defaults,
            ),
            weights,
        )

    def _set_layout(self, mesh: Mesh | None, sharding: PartitionSpec | None) -> None:
        if mesh is None and sharding is not None:
            raise ValueError(f"sharding needs a mesh, got {sharding} and no mesh")
        self.layout = None if mesh is None else automatic(array_layout(mesh, sharding))

    def _set_parts(
        self, parts: PipelineParts, weights: WeightSharding, keep_text_encoder: bool = True
    ) -> None:
        _checks.choice("weights", weights, WEIGHT_SHARDINGS)
        if self.layout is not None:
            for part in (parts.transformer, parts.transformer_2):
                if part is not None:
                    part.place_by(place_weights(self.layout, weights))
        self._parts = parts
        self._keep_text_encoder = keep_text_encoder
        self.scheduler = parts.scheduler
        self.defaults = parts.defaults

    @classmethod
    def from_pretrained(
        cls: type[Models],
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        keep_text_encoder: bool = True,
        mesh: Mesh | None = None,
        sharding: PartitionSpec | None = None,
        weights: WeightSharding = "fsdp",
    ) -> Models:
        """Opens a folder in diffusers' layout.

        All configurations and the names and shapes of all tensors are checked now. The weights of
        a model are read when a call first needs them.

        Args:
            folder: holds `model_index.json`.
            dtype: "float32" or "bfloat16" for the transformer and the text encoder; by default
                as stored. The VAE computes in float32.
            keep_text_encoder: whether the text encoder, the largest part of the published models,
                stays in memory after use.
            mesh: devices over which the transformers are sharded; None for one device.
            sharding: as for `SparseAttention`.
            weights: how weights are sharded, "tensor" or "fsdp".

        Raises:
            FileNotFoundError: the folder or a file in it is missing.
            ImportError: safetensors or tokenizers is not installed.
            ValueError: a configuration is not implemented, a file is damaged, or a tensor is
                missing, unknown or misshapen.
        """
        if dtype is not None:
            _checks.choice("dtype", dtype, ("float32", "bfloat16"))
        pipeline = cls.__new__(cls)
        pipeline._set_layout(mesh, sharding)
        pipeline._set_parts(open_folder(folder, dtype), weights, keep_text_encoder)
        return pipeline

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Encodes prompts as token ids."""
        return self._parts.tokenizer

    @property
    def text_encoder(self) -> UMT5EncoderModel:
        """Embeds token ids; its weights are read now if they were not."""
        return self._parts.text_encoder.get()

    @property
    def transformer(self) -> WanTransformer3DModel:
        """Predicts the flow; its weights are read now if they were not."""
        return self._parts.transformer.get()

    @property
    def transformer_2(self) -> WanTransformer3DModel | None:
        """The expert at low noise or None; its weights are read now if they were not."""
        return None if self._parts.transformer_2 is None else self._parts.transformer_2.get()

    @property
    def vae(self) -> VideoCodec:
        """Decodes latents; its weights are read now if they were not."""
        return self._parts.vae.get()

    @property
    def dtype(self) -> str:
        """Compute dtype of the transformer."""
        return self._parts.transformer.dtype

    @property
    def boundary_ratio(self) -> float | None:
        """Noise level below which `transformer_2` runs."""
        return self._parts.boundary_ratio


def _loaded(model: Any) -> Part[Any, Any]:
    """A part of a pipeline whose model is in memory already."""

    def load(put: Put) -> Any:
        return model if put is put_on_default_device else put_all(put, model)

    return Part(model.config, getattr(model, "dtype", "float32"), load)
