"""What is read from a diffusers-layout folder, and what is said about a bad one."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from wan_models import GOLDEN, change_json, rewrite, small_pipeline, write_json

from cinetile.kernels.xla_cpu import unpack
from cinetile.models.wan import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    LinearVideoCodec,
    PromptTokenizer,
    UMT5EncoderModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from cinetile.models.wan.schedulers import read_scheduler

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def transformer(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "wan21" / "transformer", tmp_path / "transformer"))


def shard(folder: Path) -> Path:
    """Splits a folder's weights into two files; returns their index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"part-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / WEIGHTS).unlink()
    index = folder / f"{WEIGHTS}.index.json"
    write_json(index, {"metadata": {}, "weight_map": weight_map})
    return index


def flattened(model: WanTransformer3DModel) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


class TestWeights:
    def test_missing_tensor(self, transformer: Path):
        rewrite(transformer, blocks__1__attn2__to_k__bias=None)
        with pytest.raises(ValueError, match=r"missing: tensor 'blocks\.1\.attn2\.to_k\.bias'"):
            WanTransformer3DModel.load(transformer)

    def test_unknown_tensor(self, transformer: Path):
        rewrite(transformer, blocks__2__attn1__to_q__bias=np.zeros(24, np.float32))
        with pytest.raises(ValueError, match=r"unknown: tensor 'blocks\.2\.attn1\.to_q\.bias'"):
            WanTransformer3DModel.load(transformer)

    def test_renamed_tensor(self, transformer: Path):
        rewrite(
            transformer,
            proj_out__bias=None,
            proj_out__bios=np.zeros(16, np.float32),
        )
        message = r"missing: tensor 'proj_out\.bias'; unknown: tensor 'proj_out\.bios'"
        with pytest.raises(ValueError, match=message):
            WanTransformer3DModel.load(transformer)

    def test_misshapen_tensor(self, transformer: Path):
        rewrite(transformer, proj_out__weight=np.zeros((3, 24), np.float32))
        with pytest.raises(ValueError, match=r"'proj_out\.weight' has shape \(3, 24\), wanted \("):
            WanTransformer3DModel.load(transformer)

    def test_integer_tensor(self, transformer: Path):
        rewrite(transformer, proj_out__bias=np.zeros(16, np.int32))
        with pytest.raises(ValueError, match=r"'proj_out\.bias' has dtype int32"):
            WanTransformer3DModel.load(transformer)

    def test_truncated_file(self, transformer: Path):
        path = transformer / WEIGHTS
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="truncated"):
            WanTransformer3DModel.load(transformer)

    def test_no_weights(self, transformer: Path):
        (transformer / WEIGHTS).unlink()
        with pytest.raises(FileNotFoundError, match="holds no weights"):
            WanTransformer3DModel.load(transformer)

    def test_shards(self, transformer: Path):
        whole = flattened(WanTransformer3DModel.load(transformer))
        shard(transformer)
        for tensor, other in zip(
            whole, flattened(WanTransformer3DModel.load(transformer)), strict=True
        ):
            np.testing.assert_array_equal(tensor, other)

    def test_missing_shard(self, transformer: Path):
        shard(transformer)
        (transformer / "part-1.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors is missing"):
            WanTransformer3DModel.load(transformer)

    def test_index_and_shards_disagree(self, transformer: Path):
        index = shard(transformer)
        document = json.loads(index.read_text())
        document["weight_map"]["proj_out.bias"] = "part-1.safetensors"
        document["weight_map"]["proj_out.weight"] = "part-0.safetensors"
        write_json(index, document)
        with pytest.raises(ValueError, match="is missing, but the index lists it here"):
            WanTransformer3DModel.load(transformer)

    def test_tensor_outside_the_index(self, transformer: Path):
        index = shard(transformer)
        document = json.loads(index.read_text())
        del document["weight_map"]["proj_out.bias"]
        write_json(index, document)
        with pytest.raises(ValueError, match=r"not in the index: tensor 'proj_out\.bias'"):
            WanTransformer3DModel.load(transformer)

    @pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
    def test_dtypes(self, transformer: Path, stored: type):
        tensors = load_file(transformer / WEIGHTS)
        narrow = {name: tensor.astype(stored) for name, tensor in tensors.items()}
        save_file(narrow, transformer / WEIGHTS)
        model = WanTransformer3DModel.load(transformer)
        own = "bfloat16" if stored is ml_dtypes.bfloat16 else "float32"
        assert model.dtype == own
        # diffusers keeps these in float32 whatever the rest is in.
        assert model.scale_shift_table.dtype == jnp.float32
        assert model.condition_embedder.time_embedder.linear_1.weight.dtype == jnp.float32
        assert model.blocks.norm2.weight.dtype == jnp.float32
        # Where this is raw bits, no loop can widen the weights of all layers at once.
        packed = jnp.uint16 if own == "bfloat16" and jax.default_backend() == "cpu" else own
        assert model.blocks.attn1.norm_q.weight.dtype == packed
        name = "blocks.1.ffn.net.0.proj.weight"
        np.testing.assert_array_equal(
            np.asarray(unpack(model.blocks.ffn.up.weight[1]), np.float32),
            narrow[name].astype(np.float32),
        )
        asked = "float32" if own == "bfloat16" else "bfloat16"
        assert WanTransformer3DModel.load(transformer, dtype=asked).dtype == asked

    def test_tied_embedding(self, tmp_path: Path):
        """Files name the token embedding in one way, the other, or both."""
        folder = tmp_path / "text_encoder"
        shutil.copytree(GOLDEN / "wan21" / "text_encoder", folder)
        tensors = load_file(folder / "model.safetensors")
        wanted = tensors["shared.weight"]
        for names in (("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")):
            rest = {name: tensor for name, tensor in tensors.items() if name != "shared.weight"}
            save_file(
                rest | {f"{name}.weight": wanted for name in names}, folder / "model.safetensors"
            )
            model = UMT5EncoderModel.load(folder)
            np.testing.assert_array_equal(np.asarray(model.shared.weight), wanted)


class TestConfigurations:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"window": 3}, "unknown field 'window'"),
            ({"image_dim": 1280}, "image_dim must be None, got 1280, which is not implemented"),
            ({"qk_norm": "rms_norm"}, "qk_norm must be 'rms_norm_across_heads'"),
            ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
            ({"ffn_dim": "big"}, "ffn_dim must be an integer"),
            ({"attention_head_dim": 13}, "attention_head_dim must be even"),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_transformer(self, transformer: Path, changes: dict[str, object], message: str):
        change_json(transformer / "config.json", **changes)
        with pytest.raises((TypeError, ValueError), match=message):
            WanTransformer3DModel.load(transformer)

    def test_no_json(self, transformer: Path):
        (transformer / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json: it is no JSON file"):
            WanTransformer3DModel.load(transformer)
        (transformer / "config.json").write_text("[]")
        with pytest.raises(ValueError, match="must hold a JSON object"):
            WanTransformer3DModel.load(transformer)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"is_residual": True}, "is_residual must be False"),
            ({"scale_factor_spatial": 16}, "scale_factor_spatial must be the 8"),
            ({"temperal_downsample": [True]}, "one entry less than dim_mult"),
            ({"latents_mean": [0.0]}, "latents_mean must have z_dim 4 entries"),
        ],
    )
    def test_vae(self, tmp_path: Path, changes: dict[str, object], message: str):
        folder = Path(shutil.copytree(GOLDEN / "wan21" / "vae", tmp_path / "vae"))
        change_json(folder / "config.json", **changes)
        with pytest.raises(ValueError, match=message):
            AutoencoderKLWan.load(folder)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "t5"}, "model_type must be 'umt5', got 't5'"),
            ({"feed_forward_proj": "relu"}, "feed_forward_proj must be 'gated-gelu'"),
        ],
    )
    def test_text_encoder(self, tmp_path: Path, changes: dict[str, object], message: str):
        folder = Path(shutil.copytree(GOLDEN / "wan21" / "text_encoder", tmp_path / "text"))
        change_json(folder / "config.json", **changes)
        with pytest.raises(ValueError, match=message):
            UMT5EncoderModel.load(folder)


class TestSchedulers:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(GOLDEN / "wan21" / "scheduler", tmp_path / "scheduler"))

    def test_unipc(self, folder: Path):
        assert read_scheduler(folder) == UniPCMultistepScheduler(flow_shift=3.0)

    def test_euler(self, folder: Path):
        write_json(
            folder / "scheduler_config.json",
            {
                "_class_name": "FlowMatchEulerDiscreteScheduler",
                "shift": 5.0,
                "max_shift": 1.15,
                "use_dynamic_shifting": False,
            },
        )
        assert read_scheduler(folder) == FlowMatchEulerDiscreteScheduler(shift=5.0)
        assert read_scheduler(folder).with_shift(2.0) == FlowMatchEulerDiscreteScheduler(2.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"_class_name": "DDIMScheduler"}, "_class_name must be one of"),
            ({"prediction_type": "epsilon"}, "prediction_type must be 'flow_prediction'"),
            ({"use_flow_sigmas": None}, "use_flow_sigmas must be True, got nothing"),
            ({"use_karras_sigmas": True}, "use_karras_sigmas must be False"),
            ({"flow_shift": 0}, "flow_shift must be above 0"),
            ({"solver": 1}, "unknown field 'solver'"),
        ],
    )
    def test_what_is_not_implemented(self, folder: Path, changes: dict[str, object], message: str):
        change_json(folder / "scheduler_config.json", **changes)
        with pytest.raises(ValueError, match=message):
            read_scheduler(folder)


class TestTokenizer:
    def test_ids(self):
        ids, mask = PromptTokenizer(GOLDEN / "wan21" / "tokenizer")(["a\n red &amp;amp; cat"], 6)
        assert ids.tolist() == [[3, 4, 11, 2, 1, 0]]
        assert mask.tolist() == [[True] * 5 + [False]]

    def test_too_long(self):
        tokenizer = PromptTokenizer(GOLDEN / "wan21" / "tokenizer")
        assert tokenizer(["red " * 4], 5)[1].all()
        with pytest.raises(ValueError, match=r"prompt must have at most 5 tokens .* got 6"):
            tokenizer(["red " * 5], 5)

    def test_only_a_sentencepiece_model(self, tmp_path: Path):
        (tmp_path / "spiece.model").touch()
        with pytest.raises(FileNotFoundError, match=r"spiece\.model alone is not read"):
            PromptTokenizer(tmp_path)

    def test_damaged(self, tmp_path: Path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match="expected a tokenizer"):
            PromptTokenizer(tmp_path)


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return small_pipeline(tmp_path / "model")

    def test_opens_without_reading_weights(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: object) -> None:
            raise AssertionError("weights were read")

        monkeypatch.setattr("cinetile.models.wan.weights.WeightFiles.read", refuse)
        pipe = WanPipeline.from_pretrained(folder)
        assert pipe.defaults.num_frames == 3
        assert pipe.dtype == "float32"
        with pytest.raises(AssertionError, match="weights were read"):
            _ = pipe.transformer

    def test_text_encoder_can_be_dropped(self, folder: Path):
        for keep in (True, False):
            pipe = WanPipeline.from_pretrained(folder, keep_text_encoder=keep)
            before = pipe.text_encoder
            pipe.encode_prompt("a red ball")
            assert (pipe.text_encoder is before) == keep

    def test_no_folder(self, tmp_path: Path):
        with pytest.raises(FileNotFoundError, match="model must be a folder"):
            WanPipeline.from_pretrained(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"model_index\.json is missing"):
            WanPipeline.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"_class_name": "WanImageToVideoPipeline"},
                "_class_name must be one of WanPipeline, got",
            ),
            ({"expand_timesteps": True}, "expand_timesteps"),
            ({"image_encoder": ["transformers", "CLIP"]}, "unknown part 'image_encoder'"),
            ({"transformer": [None, None]}, "transformer must be WanTransformer3DModel"),
            ({"boundary_ratio": 0.5}, "boundary_ratio needs a transformer_2"),
            (
                {"transformer_2": ["diffusers", "WanTransformer3DModel"]},
                "transformer_2 needs a boundary_ratio",
            ),
        ],
    )
    def test_index(self, folder: Path, changes: dict[str, object], message: str):
        change_json(folder / "model_index.json", **changes)
        with pytest.raises(ValueError, match=message):
            WanPipeline.from_pretrained(folder)

    def test_unknown_codec(self, folder: Path):
        change_json(folder / "vae" / "config.json", _class_name="AutoencoderKL")
        with pytest.raises(ValueError, match="_class_name must be one of AutoencoderKLWan, Lin"):
            WanPipeline.from_pretrained(folder)

    def test_parts_must_fit(self, folder: Path):
        values = 48
        rewrite(
            folder / "vae",
            encoder__weight=np.zeros((5, values), np.float32),
            decoder__weight=np.zeros((values, 5), np.float32),
        )
        change_json(folder / "vae" / "config.json", z_dim=5)
        with pytest.raises(ValueError, match="transformer in_channels must be the vae z_dim 5"):
            WanPipeline.from_pretrained(folder)

    def test_defaults(self, folder: Path):
        change_json(folder / "generation.json", num_frames=0)
        with pytest.raises(ValueError, match="num_frames must be at least 1"):
            WanPipeline.from_pretrained(folder)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"patch_size": [2, 4, 4]}, r"patch_size must be \(1, n, n\)"),
            ({"out_channels": 1}, "out_channels must be in_channels 3, got 1"),
            ({"latents_std": [1.0]}, "latents_std must have z_dim 4 entries, got 1"),
        ],
    )
    def test_linear_codec_configuration(
        self, folder: Path, changes: dict[str, object], message: str
    ):
        change_json(folder / "vae" / "config.json", **changes)
        with pytest.raises(ValueError, match=message):
            WanPipeline.from_pretrained(folder)

    def test_linear_codec(self, folder: Path):
        codec = LinearVideoCodec.deferred(folder / "vae").get()
        latents = np.random.default_rng(1).normal(size=(2, 4, 3, 2, 5)).astype(np.float32) * 0.2
        video = codec.decode(latents)
        assert video.shape == (2, 3, 3, 8, 20)
        np.testing.assert_allclose(codec.encode(video), latents, atol=1e-5)
        # The patch at row 1, column 2 of a frame, flattened by row, column and color.
        patch = video[0, :, 0, 4:8, 8:12].transpose(1, 2, 0).reshape(-1)
        mean, decoder = np.asarray(codec.mean), np.asarray(codec.decoder.weight)
        np.testing.assert_allclose(patch, decoder @ latents[0, :, 0, 1, 2] + mean, atol=1e-5)
