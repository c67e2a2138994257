"""Training of the small checkpoint; needs the extra `train`, parity also diffusers."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from training.tiny_wan import export, flow, model, scenes, text, train  # noqa: E402

SMALL = model.ModelConfig(2, 12, 2, 32)
STAGE = train.Stage(steps=4, batch=2, frames=2, variety=scenes.EASY)


@pytest.fixture(scope="module")
def system() -> flow.System:
    made = flow.make_system()
    return flow.System(SMALL, made.text, made.words, made.codec)


def random_params(system: flow.System) -> dict:
    """Weights none of which is all zeros, so that every path counts."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in system.init(generator).items()
    }


def test_a_saved_run_continues_where_it_stopped(system: flow.System, tmp_path: Path) -> None:
    def steps(run: train.Run, data: train.Data, count: int) -> None:
        for _ in range(count):
            data.loss(system, run.params, STAGE).backward()
            run.advance(0.5)

    through = train.Run(tmp_path / "through", system)
    data = train.Data.seeded(0)
    steps(through, data, 2)
    through.save()
    (tmp_path / "through").rename(tmp_path / "halved")
    resumed = train.Run(tmp_path / "halved", system)
    assert resumed.step == 2
    noise, rng = data.noise.get_state(), data.rng.bit_generator.state
    steps(through, data, 2)
    data.noise.set_state(noise)
    data.rng.bit_generator.state = rng
    steps(resumed, data, 2)
    for name, value in through.params.items():
        torch.testing.assert_close(value, resumed.params[name], rtol=0, atol=0)
        torch.testing.assert_close(through.average[name], resumed.average[name], rtol=0, atol=0)


def test_every_weight_gets_a_gradient(system: flow.System) -> None:
    params = {k: v.requires_grad_() for k, v in random_params(system).items()}
    train.Data.seeded(0).loss(system, params, STAGE).backward()
    for name, value in params.items():
        assert value.grad is not None, name
        assert float(value.grad.abs().max()) > 0, name


def test_helpers_gradients_are_averaged_unless_stale(system: flow.System) -> None:
    params = {
        name: value.requires_grad_() for name, value in system.init(torch.Generator()).items()
    }
    exchange = train.Exchange(params, helpers=2)
    for slot, filled, step, size in zip(
        exchange.gradients, exchange.filled, (7, 2), (3.0, 100.0), strict=True
    ):
        for value in slot.values():
            value.fill_(size)
        filled.value = step
    for value in params.values():
        value.grad = torch.ones_like(value)
    assert exchange.collect(params, step=8) == 2
    for value in params.values():
        assert value.grad is not None
        torch.testing.assert_close(value.grad, torch.full_like(value, 2.0))
    assert [filled.value for filled in exchange.filled] == [-1, -1]


def test_the_recipe_ends() -> None:
    total = sum(stage.steps for stage in train.RECIPE)
    last = train.stage_at(total - 1)
    assert last is not None
    assert last[0] == train.RECIPE[-1]
    assert last[1] == pytest.approx(train.RECIPE[-1].last_rate, abs=0.01)
    assert train.stage_at(total) is None


def test_sampling_follows_the_seed(system: flow.System) -> None:
    params = random_params(system)
    first, again, other = (
        flow.sample(system, params, ["a red ball moves up"], frames=2, steps=2, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first.shape == (1, 2, 64, 64, 3)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_too_long_captions_are_refused(system: flow.System) -> None:
    with pytest.raises(ValueError, match="at most 24 tokens"):
        text.tokenize(["red " * 24], system.words)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_diffusers_and_transformers_compute_the_same(system: flow.System, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    params = {name: value.bfloat16().float() for name, value in random_params(system).items()}
    export.export(tmp_path, params, system)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    encoder = transformers.UMT5EncoderModel.from_pretrained(
        tmp_path / "text_encoder", dtype=torch.float32
    ).eval()
    config = json.loads((tmp_path / "transformer/config.json").read_text())
    theirs = diffusers.WanTransformer3DModel.from_config(config).eval()
    stored = load_file(tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    theirs.load_state_dict({name: value.float() for name, value in stored.items()})
    theirs = theirs.float()

    captions = ["A striped red ball rolls to the right", ""]
    tokens = words(captions, padding="max_length", max_length=24, return_tensors="pt")
    ids = text.tokenize(captions, system.words)
    assert torch.equal(tokens.input_ids, ids)
    latents = torch.randn(2, 3, 8, 8, 16, generator=torch.Generator().manual_seed(1))
    moment = torch.tensor([0.97, 0.3])
    with torch.no_grad():
        state = encoder(ids, attention_mask=tokens.attention_mask).last_hidden_state
        state = state * tokens.attention_mask[..., None]
        own = {k.removeprefix("text."): v for k, v in params.items() if k.startswith("text.")}
        mine = text.embed(own, system.text, ids)
        torch.testing.assert_close(mine, state, atol=1e-5, rtol=0)
        expected = theirs(
            hidden_states=latents.permute(0, 4, 1, 2, 3),
            timestep=moment * 1000,
            encoder_hidden_states=state,
        ).sample.permute(0, 2, 3, 4, 1)
        tables = model.rope_tables(SMALL, torch.arange(3), 4, 4)
        found = model.velocity(params, SMALL, latents, moment, mine, tables)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
