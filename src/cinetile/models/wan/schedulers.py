"""Flow-matching schedulers: the timesteps of a run and the solver's update at each of them."""

import abc
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cinetile import _checks
from cinetile.models.wan.config import parse_config, read_json, require_class

_TRAIN_TIMESTEPS = 1000
# The first noise level stays below 1, because the solver takes log(1 - sigma).
_MARGIN = 1e-6


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of one run, and the coefficients of the solver's update at each.

    Attributes:
        timesteps: the model's timestep input at each step, in [0, 1000].
        sigmas: noise level before each step, and 0 after the last.
        coefficients: arguments of the scheduler's `step`, one row per step.
    """

    timesteps: Float[np.ndarray, " steps"]
    sigmas: Float[np.ndarray, " levels"]
    coefficients: Float[np.ndarray, "steps terms"] = field(repr=False)


class Scheduler(abc.ABC):
    """A solver. Its state is a pytree of arrays, so that one compiled `step` serves all steps.

    Attributes:
        num_train_timesteps: the timestep at noise level 1.
    """

    num_train_timesteps: int

    @abc.abstractmethod
    def schedule(self, num_inference_steps: int) -> Schedule:
        """Returns the schedule of a run of `num_inference_steps` steps."""

    @abc.abstractmethod
    def with_shift(self, shift: float) -> "Scheduler":
        """The same scheduler with another shift of the noise levels towards 1."""

    @abc.abstractmethod
    def init(self, sample: Float[Array, "*axes"]) -> Any:
        """The state before the first step, for samples of the shape of `sample`."""

    @abc.abstractmethod
    def step(
        self,
        coefficients: Float[np.ndarray, " terms"],
        state: Any,
        model_output: Float[Array, "*axes"],
        sample: Float[Array, "*axes"],
    ) -> tuple[Float[Array, "*axes"], Any]:
        """Takes one step.

        Args:
            coefficients: the step's row of `Schedule.coefficients`.
            state: the state that the previous step, or `init`, returned.
            model_output: the flow that the model predicts at `sample`.
            sample: noisy latents, float32.

        Returns:
            The sample at the next noise level, and the new state.
        """


@dataclass(frozen=True)
class FlowMatchEulerDiscreteScheduler(Scheduler):
    """Euler's method on the flow.

    Attributes:
        shift: shift s of the noise levels towards 1, `s x / (1 + (s - 1) x)`.
        num_train_timesteps: the timestep at noise level 1.

    Raises:
        ValueError: a value is out of range.
    """

    shift: float = 1.0
    num_train_timesteps: int = _TRAIN_TIMESTEPS

    class_name: ClassVar[str] = "FlowMatchEulerDiscreteScheduler"

    def __post_init__(self) -> None:
        _checks.positive("shift", self.shift)
        _checks.integer("num_train_timesteps", self.num_train_timesteps, minimum=1)

    def schedule(self, num_inference_steps: int) -> Schedule:
        """See `Scheduler`. As upstream, the last level is shifted twice and the others once."""
        steps = _checks.integer("num_inference_steps", num_inference_steps, minimum=1)
        train = self.num_train_timesteps
        lowest = np.float32(_shift(np.float32(1 / train), self.shift))
        sigmas = _shift(np.linspace(train, lowest * train, steps) / train, self.shift)
        sigmas = sigmas.astype(np.float32)
        levels = np.append(sigmas, np.float32(0))
        return Schedule(sigmas * np.float32(train), levels, np.diff(levels)[:, np.newaxis])

    def with_shift(self, shift: float) -> Scheduler:
        """See `Scheduler`."""
        return replace(self, shift=shift)

    def init(self, sample: Float[Array, "*axes"]) -> Any:
        """See `Scheduler`; there is no state."""
        del sample
        return ()

    def step(
        self,
        coefficients: Float[np.ndarray, " terms"],
        state: Any,
        model_output: Float[Array, "*axes"],
        sample: Float[Array, "*axes"],
    ) -> tuple[Float[Array, "*axes"], Any]:
        """See `Scheduler`."""
        return _euler_step(jnp.asarray(coefficients), model_output, sample), state


@jax.jit
def _euler_step(coefficients: Array, model_output: Array, sample: Array) -> Array:
    return sample + coefficients[0] * model_output.astype(jnp.float32)


class _History(eqx.Module):
    """State of UniPC: predictions of the clean sample, newest first, and the last sample."""

    predictions: Float[Array, "order *axes"]
    last_sample: Float[Array, "*axes"]


@dataclass(frozen=True)
class UniPCMultistepScheduler(Scheduler):
    """UniPC, a multistep predictor-corrector, on the flow.

    Attributes:
        flow_shift: shift of the noise levels towards 1; 3 for 480p, 5 for 720p.
        solver_order: order of the solver: number of predictions that a step uses, 1 to 3.
        solver_type: "bh2" or "bh1", the paper's B(h).
        num_train_timesteps: the timestep at noise level 1.
        disable_corrector: steps after which the corrector is skipped.

    Raises:
        ValueError: a value is out of range.

    References:
        Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of
        Diffusion Models", 2023.
    """

    flow_shift: float = 1.0
    solver_order: int = 2
    solver_type: str = "bh2"
    num_train_timesteps: int = _TRAIN_TIMESTEPS
    disable_corrector: tuple[int, ...] = ()

    class_name: ClassVar[str] = "UniPCMultistepScheduler"

    def __post_init__(self) -> None:
        _checks.positive("flow_shift", self.flow_shift)
        _checks.integer("solver_order", self.solver_order, minimum=1, maximum=3)
        _checks.choice("solver_type", self.solver_type, ("bh1", "bh2"))
        _checks.integer("num_train_timesteps", self.num_train_timesteps, minimum=1)

    def schedule(self, num_inference_steps: int) -> Schedule:
        """See `Scheduler`. Timesteps are integers."""
        steps = _checks.integer("num_inference_steps", num_inference_steps, minimum=1)
        train = self.num_train_timesteps
        sigmas = _shift(np.linspace(1, 1 / train, steps + 1)[:-1], self.flow_shift)
        if abs(sigmas[0] - 1) < _MARGIN:
            sigmas[0] -= _MARGIN
        timesteps = np.trunc(sigmas * train).astype(np.float32)
        levels = np.append(sigmas, 0).astype(np.float32)
        # The first steps have few earlier predictions; the last steps lower the order as upstream.
        orders = [min(self.solver_order, step + 1, steps - step) for step in range(steps)]
        sigmas = levels.astype(np.float64)
        with np.errstate(divide="ignore"):  # the last level is 0
            half_log_snr = np.log1p(-sigmas) - np.log(sigmas)
        rows = [self._row(sigmas, half_log_snr, step, orders) for step in range(steps)]
        return Schedule(timesteps, levels, np.stack(rows).astype(np.float32))

    def _row(
        self,
        sigmas: Float[np.ndarray, " levels"],
        half_log_snr: Float[np.ndarray, " levels"],
        step: int,
        orders: list[int],
    ) -> Float[np.ndarray, " terms"]:
        """The row that `step` splits: sigma, corrector switch, corrector and predictor weights."""
        used, corrector = 0.0, np.zeros(self.solver_order + 2)
        if step > 0 and step - 1 not in self.disable_corrector:
            used, before = 1.0, step - 1
            corrector = self._weights(sigmas, half_log_snr, before, orders[before], corrects=True)
        predictor = self._weights(sigmas, half_log_snr, step, orders[step], corrects=False)[:-1]
        return np.concatenate([[sigmas[step], used], corrector, predictor])

    def _weights(
        self,
        sigmas: Float[np.ndarray, " levels"],
        half_log_snr: Float[np.ndarray, " levels"],
        step: int,
        order: int,
        *,
        corrects: bool,
    ) -> Float[np.ndarray, " terms"]:
        """Weights of the sample, of the predictions (newest first), and of the end's prediction.

        Write alpha = 1 - sigma, lambda = log(alpha / sigma), and h for the step's increase of
        lambda. With predictions D_0 at the start of the step, D_m at m steps before it, and
        r_m = (lambda_m - lambda_0) / h, the update is (UniPC, data prediction)

            x_end = (sigma_end / sigma) x - alpha_end (exp(-h) - 1) D_0
                    - alpha_end B(h) sum_m (a_m / r_m) (D_m - D_0)

        with B(h) = exp(-h) - 1 for "bh2" and -h for "bh1". The corrector has one more term, the
        prediction at the end of the step, with r = 1. `decay` is -h and `growth` exp(-h) - 1.
        """
        sigma_from, sigma_to = sigmas[step], sigmas[step + 1]
        decay = half_log_snr[step] - half_log_snr[step + 1]
        growth = np.expm1(decay)
        ratios = np.array(
            [(half_log_snr[step] - half_log_snr[step - i]) / decay for i in range(1, order)]
        )
        shares = self._shares(decay, np.append(ratios, 1.0), corrects)
        weights = np.zeros(self.solver_order + 2)
        weights[0] = sigma_to / sigma_from
        weights[1] = -(1 - sigma_to) * growth
        scale = growth if self.solver_type == "bh2" else decay
        # Each difference D_m - D_0 adds to the weight of D_m and subtracts from that of D_0.
        entries = [*range(2, order + 1), self.solver_order + 1]
        for entry, share, ratio in zip(entries, shares, [*ratios, 1.0], strict=False):
            weight = (1 - sigma_to) * scale * share / ratio
            weights[entry] -= weight
            weights[1] += weight
        return weights

    def _shares(
        self, decay: float, ratios: Float[np.ndarray, " order"], corrects: bool
    ) -> Float[np.ndarray, " shares"]:
        """The a_m of the update in `_weights`.

        They solve sum_m r_m^(k - 1) a_m = k! z phi_(k + 1)(z) / B(h) for k = 1 .. number of terms,
        with z = -h, phi_1(z) = (exp(z) - 1) / z and phi_(k + 1)(z) = (phi_k(z) - 1 / k!) / z. As in
        the published code, a single difference gets 1/2 for the predictor of order 2 and the
        corrector of order 1.
        """
        order = ratios.size
        if corrects and order == 1:
            return np.array([0.5])
        if not corrects and order <= 2:
            return np.array([0.5])[: order - 1]
        terms = order if corrects else order - 1
        growth = np.expm1(decay)
        scale = growth if self.solver_type == "bh2" else decay
        remainder, factorial, wanted = growth / decay - 1, 1, []
        for power in range(1, order + 1):
            wanted.append(remainder * factorial / scale)
            factorial *= power + 1
            remainder = remainder / decay - 1 / factorial
        powers = np.stack([ratios**power for power in range(order)])
        return np.linalg.solve(powers[:terms, :terms], np.array(wanted)[:terms])

    def with_shift(self, shift: float) -> Scheduler:
        """See `Scheduler`."""
        return replace(self, flow_shift=shift)

    def init(self, sample: Float[Array, "*axes"]) -> Any:
        """See `Scheduler`."""
        sample = sample.astype(jnp.float32)
        return _History(jnp.zeros((self.solver_order, *sample.shape), jnp.float32), sample)

    def step(
        self,
        coefficients: Float[np.ndarray, " terms"],
        state: Any,
        model_output: Float[Array, "*axes"],
        sample: Float[Array, "*axes"],
    ) -> tuple[Float[Array, "*axes"], Any]:
        """See `Scheduler`."""
        return _unipc_step(jnp.asarray(coefficients), state, model_output, sample)


@jax.jit
def _unipc_step(
    coefficients: Array, state: _History, model_output: Array, sample: Array
) -> tuple[Array, _History]:
    order = state.predictions.shape[0]
    sigma, used = coefficients[0], coefficients[1]
    corrector, predictor = jnp.split(coefficients[2:], [order + 2])
    clean = sample - sigma * model_output.astype(jnp.float32)
    corrected = (
        corrector[0] * state.last_sample
        + jnp.tensordot(corrector[1:-1], state.predictions, axes=1, precision="highest")
        + corrector[-1] * clean
    )
    sample = jnp.where(used > 0, corrected, sample)
    predictions = jnp.concatenate([clean[jnp.newaxis], state.predictions[:-1]])
    following = predictor[0] * sample + jnp.tensordot(
        predictor[1:], predictions, axes=1, precision="highest"
    )
    return following, _History(predictions, sample)


def _shift(sigmas: Any, shift: float) -> Any:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


_UNUSED = {
    "FlowMatchEulerDiscreteScheduler": (
        "base_shift",
        "max_shift",
        "base_image_seq_len",
        "max_image_seq_len",
        "time_shift_type",
    ),
    "UniPCMultistepScheduler": (
        "beta_start",
        "beta_end",
        "beta_schedule",
        "trained_betas",
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "timestep_spacing",
        "steps_offset",
        "rescale_betas_zero_snr",
        "time_shift_type",
        "sigma_min",
        "sigma_max",
    ),
}
_FIXED: dict[str, dict[str, object]] = {
    "FlowMatchEulerDiscreteScheduler": {
        "use_dynamic_shifting": False,
        "invert_sigmas": False,
        "shift_terminal": None,
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "stochastic_sampling": False,
    },
    "UniPCMultistepScheduler": {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "predict_x0": True,
        "thresholding": False,
        "lower_order_final": True,
        "final_sigmas_type": "zero",
        "solver_p": None,
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "use_dynamic_shifting": False,
        "shift_terminal": None,
    },
}
# If these fields are absent, their default means something that is not implemented.
_REQUIRED = {"UniPCMultistepScheduler": ("prediction_type", "use_flow_sigmas")}


def read_scheduler(folder: str | os.PathLike[str]) -> Scheduler:
    """Reads the `scheduler_config.json` of a pipeline's `scheduler` folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the class, a field or its value is not implemented.
    """
    path = Path(folder) / "scheduler_config.json"
    document = read_json(path)
    kinds = {
        kind.class_name: kind for kind in (UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler)
    }
    name = require_class(document, path, *kinds)
    for required in _REQUIRED.get(name, ()):
        if required not in document:
            raise ValueError(f"{path}: {required} must be {_FIXED[name][required]!r}, got nothing")
    return parse_config(kinds[name], document, path, fixed=_FIXED[name], ignored=_UNUSED[name])
