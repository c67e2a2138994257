"""What a whole run gains where some attention calls become faster; a model, nothing runs.

`WholeRun` has no constant that was fitted. `check_published` holds it against the end-to-end
times that the case study published for TPUs. `model_dense_stack` puts this library's TPU kernel in
a faster dense run that was published later.
"""

from dataclasses import dataclass

from cinetile import _checks
from cinetile.lab.compare.shapes import MODELS, RESOLUTIONS
from cinetile.policy import SparsityPolicy
from cinetile.policy.intervals import require_countable


@dataclass(frozen=True)
class WholeRun:
    """A run in which some of the self-attention calls are sparse.

    All layers of a dense run take the same time, and every sparse call is sped up alike.

    Attributes:
        sparse_calls: share of the attention calls (steps x layers) that are sparse, in [0, 1].
        attention_share: attention's share of a dense layer's time, in (0, 1].
        attention_speedup: time of a dense call over that of a sparse one, with all that comes
            with it: routing, moving tokens, communication.
        outside_share: share of the dense run's time that no layer takes, in [0, 1): text
            encoder, autoencoder, schedulers.

    Raises:
        TypeError: a value is no number.
        ValueError: a value is out of range.
    """

    sparse_calls: float
    attention_share: float
    attention_speedup: float
    outside_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sparse_calls", "outside_share"):
            share = _checks.finite(name, getattr(self, name))
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {share}")
            object.__setattr__(self, name, share)
        if self.outside_share == 1.0:
            raise ValueError("outside_share must be below 1, or no layer takes any time")
        _checks.fraction("attention_share", self.attention_share)
        _checks.positive("attention_speedup", self.attention_speedup)

    @property
    def layer_speedup(self) -> float:
        """Time of a dense layer over that of a sparse one."""
        return 1 / (1 - self._saved_of_layer)

    @property
    def speedup(self) -> float:
        """Time of the dense run over that of the sparse one."""
        return 1 / (1 - (1 - self.outside_share) * self.sparse_calls * self._saved_of_layer)

    @property
    def _saved_of_layer(self) -> float:
        return self.attention_share * (1 - 1 / self.attention_speedup)


def sparse_call_share(policy: SparsityPolicy, num_steps: int, num_layers: int) -> float:
    """Share of a run's attention calls that a policy makes sparse.

    Args:
        policy: which steps and layers are sparse.
        num_steps: denoising steps of the run.
        num_layers: layers of the model.
    """
    steps = _checks.integer("num_steps", num_steps, minimum=1)
    layers = _checks.integer("num_layers", num_layers, minimum=1)
    require_countable(steps, layers)
    sparse = sum(
        policy.densities(step, layer, num_steps=steps, num_layers=layers) is not None
        for step in range(steps)
        for layer in range(layers)
    )
    return sparse / (steps * layers)


@dataclass(frozen=True)
class PublishedRun:
    """What the case study published for one resolution, on 8 chips in 40 steps.

    Attributes:
        attention_share: attention's share of a layer's latency.
        dense_s: seconds of the dense run, end to end.
        sparse_s: seconds of the run under its aggressive policy.
    """

    attention_share: float
    dense_s: float
    sparse_s: float

    @property
    def speedup(self) -> float:
        return self.dense_s / self.sparse_s


PUBLISHED_RUNS: dict[str, PublishedRun] = {
    "720p": PublishedRun(0.555, 153.50, 119.86),
    "1080p": PublishedRun(0.725, 683.0, 457.0),
    "1440p": PublishedRun(0.882, 2471.0, 1461.0),
}
PUBLISHED_STEPS = 40


@dataclass(frozen=True)
class AttentionCall:
    """Times of one layer's attention at one length, from which other lengths follow.

    Attributes:
        num_tokens: the length at which the times hold.
        dense_ms: the dense kernel.
        sparse_ms: the sparse kernel.
        overhead_ms: what a sparse call takes besides its kernel: routing, moving tokens,
            communication.
    """

    num_tokens: int
    dense_ms: float
    sparse_ms: float
    overhead_ms: float = 0.0

    def speedup_at(self, num_tokens: int) -> float:
        """Speed-up at another length: kernels grow with its square, the overhead with it."""
        ratio = num_tokens / self.num_tokens
        return self.dense_ms * ratio / (self.sparse_ms * ratio + self.overhead_ms)


_KERNELS = AttentionCall(RESOLUTIONS["720p"].num_tokens, dense_ms=78.70, sparse_ms=32.76)
# 46.81 ms were published for one layer and step with routing, permutation and communication.
_WITH_OVERHEAD = AttentionCall(
    _KERNELS.num_tokens, _KERNELS.dense_ms, _KERNELS.sparse_ms, 46.81 - _KERNELS.sparse_ms
)


@dataclass(frozen=True)
class PublishedCheck:
    """The model of a whole run against one published run.

    Attributes:
        resolution: name of the video's size.
        attention_share: published; the model takes it.
        published: end-to-end speed-up, published.
        of_kernels: end-to-end speed-up by the model if a sparse call takes only its kernel's time.
        with_overhead: the same where routing, permutation and communication come on top.
    """

    resolution: str
    attention_share: float
    published: float
    of_kernels: float
    with_overhead: float

    @property
    def of_kernels_deviation(self) -> float:
        """Relative to what was published."""
        return self.of_kernels / self.published - 1

    @property
    def with_overhead_deviation(self) -> float:
        """Relative to what was published."""
        return self.with_overhead / self.published - 1


def check_published(policy: SparsityPolicy | None = None) -> tuple[PublishedCheck, ...]:
    """Holds the model against the published runs; nothing in it is fitted to them.

    Which steps and layers were sparse is not published: the policy says it. Kernel times are
    published only for 720p and scaled to other lengths. The dense call gets no overhead, though
    in truth it communicates too, so `with_overhead` is on the low side.

    Args:
        policy: what was sparse; the preset "aggressive" by default.
    """
    chosen = SparsityPolicy.preset("aggressive") if policy is None else policy
    sparse_calls = sparse_call_share(chosen, PUBLISHED_STEPS, MODELS["14B"].num_layers)

    def estimate(resolution: str, call: AttentionCall) -> float:
        share = PUBLISHED_RUNS[resolution].attention_share
        speedup = call.speedup_at(RESOLUTIONS[resolution].num_tokens)
        return WholeRun(sparse_calls, share, speedup).speedup

    return tuple(
        PublishedCheck(
            resolution=resolution,
            attention_share=run.attention_share,
            published=run.speedup,
            of_kernels=estimate(resolution, _KERNELS),
            with_overhead=estimate(resolution, _WITH_OVERHEAD),
        )
        for resolution, run in PUBLISHED_RUNS.items()
    )


@dataclass(frozen=True)
class DenseRun:
    """A published run with dense attention, from which longer videos follow by a model.

    Attributes:
        num_tokens: tokens of the video.
        total_s: seconds of denoising.
        num_calls: attention calls that follow each other on a chip, steps times layers.
        call_ms: time of each attention call.
    """

    num_tokens: int
    total_s: float
    num_calls: int
    call_ms: float

    def seconds_at(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of attention and of the rest at another length.

        Attention grows with the square of the length and the rest with the length.
        """
        ratio = num_tokens / self.num_tokens
        attention_s = self.num_calls * self.call_ms * 1e-3
        return attention_s * ratio**2, (self.total_s - attention_s) * ratio


# maxdiffusion's dense run of Wan 2.2 14B on v6e-8, 720p in 40 steps: 122.2 s of denoising. Its
# kernel subtracts a fixed maximum; a call of 75,600 tokens x 10 heads x 128 takes about 53 ms.
DENSE_STACK = DenseRun(
    RESOLUTIONS["720p"].num_tokens,
    total_s=122.2,
    num_calls=PUBLISHED_STEPS * MODELS["14B"].num_layers,
    call_ms=53.0,
)
# Static estimates of `pallas_tpu` at 720p on v6e, fixed bound (`python -m benchmarks.tpu_static`).
_ESTIMATED_MS = {"split": 25.4, "aligned": 21.2}
# Placement, transposition and guard (1.4 ms by bytes) and routing (1.3 ms), counted by hand.
_ESTIMATED_OVERHEAD_MS = 2.7


@dataclass(frozen=True)
class ModelledRun:
    """A model of a run on the dense stack with this library's TPU kernel; nothing ran.

    Attributes:
        resolution: name of the video's size.
        mode: "split" (exact pairs) or "aligned".
        dense_s: seconds of the dense run; published for 720p, modelled for longer videos.
        sparse_s: seconds of the sparse run by the model.
        attention_share: attention's share of the dense run.
    """

    resolution: str
    mode: str
    dense_s: float
    sparse_s: float
    attention_share: float

    @property
    def speedup(self) -> float:
        """Time of the dense run over that of the sparse one."""
        return self.dense_s / self.sparse_s


def model_dense_stack(policy: SparsityPolicy | None = None) -> tuple[ModelledRun, ...]:
    """Models runs on `DENSE_STACK` with sparse calls by this library's TPU kernel.

    The sparse calls' times are static estimates and the overhead is counted by hand; communication
    is assumed to take the same time in both runs.

    Args:
        policy: which steps and layers are sparse; the preset "aggressive" by default.
    """
    chosen = SparsityPolicy.preset("aggressive") if policy is None else policy
    sparse_calls = sparse_call_share(chosen, PUBLISHED_STEPS, MODELS["14B"].num_layers)
    runs = []
    for resolution in PUBLISHED_RUNS:
        tokens = RESOLUTIONS[resolution].num_tokens
        attention_s, rest_s = DENSE_STACK.seconds_at(tokens)
        dense_s = attention_s + rest_s
        share = attention_s / dense_s
        for mode, sparse_ms in _ESTIMATED_MS.items():
            call = AttentionCall(
                DENSE_STACK.num_tokens, DENSE_STACK.call_ms, sparse_ms, _ESTIMATED_OVERHEAD_MS
            )
            run = WholeRun(sparse_calls, share, call.speedup_at(tokens))
            runs.append(ModelledRun(resolution, mode, dense_s, dense_s / run.speedup, share))
    return tuple(runs)
