"""How each product is quantized, decided from its inputs during a calibration.

Products are decided in the order in which the model computes them, as soon as their input is known, so no activations
have to be kept. Decisions are independent of each other: a factor on a matrix's rows changes neither the codes of these
rows nor their errors.

Some products have too large an error with int8 activations even after smoothing: typically down projections, where a
single token makes a few channels a thousand times larger than all others. If the recipe allows it and it suffices, a
few of their input columns stay fp16; else all their activations stay float, with int8 weights. Both cost little time,
because the size of the weights hardly grows. Of a recipe that rotates all inputs, a product keeps its rotation unless
that raises its error, as it may behind a ReLU, whose zeros int8 holds exactly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np

from ..backend.base import Backend
from ..backend.host_threads import Later
from ..backend.quantization import Int8Weight
from ..backend.values import Array
from ..checkpoint.conversion import LARGEST_WEIGHT
from ..checkpoint.opened_model import OpenedModel
from ..checkpoint.recipe import CalibrationSettings, Recipe, RotatedInputs, Scheme
from ..checkpoint.weight_rewrite import NO_REWRITE, CalibrationResult, WeightRewrite
from ..errors import CheckpointError
from ..models.spec import Fold, KeyHeads, Role, Spec
from .calibration import Observation, sample_rows
from .errors import ErrorEvaluator, QuantizationCandidate
from .gptq import GPTQInputs, GPTQRounding
from .key_factors import fold_key_factors, key_factors
from .smoothing import EXPONENTS, FEW_EXPONENTS, Smoothing, expand_channels, fold_factors, limit_range, search_smoothing

SEARCH_TOKENS, FEW_SEARCH_TOKENS = 512, 256
"""The number of tokens on which the search for a smoothing compares its settings; few if there are several options."""

FP16_MAX = float(np.finfo(np.float16).max)

EVALUATION_TOKENS = 4096
"""The number of tokens of the reported errors, which also decide whether activations stay float."""

OPTION_TOKENS, LEAST_OPTION_TOKENS, OPTION_ELEMENTS = 256, 128, 1 << 24
"""The number of tokens on which the options of a product are compared: fewer, where that makes more outputs."""


@dataclass(frozen=True)
class Decision:
    """The decision for a product, its error with the recipe alone (``error_before``), and with the decision.

    ``exponent`` is that of the smoothing, None without one; ``outlier_columns`` are the inputs kept in fp16;
    ``rounding`` is ``nearest`` or ``gptq``; ``rotation`` is the block in which inputs are rotated, 1 for none.
    """

    tensors: tuple[str, ...]
    scheme: Scheme
    exponent: float | None
    outlier_columns: tuple[int, ...]
    rounding: str
    error_before: float
    error: float
    rotation: int = 1


class Uniform(str, Enum):
    """A quantization of all products alike, rounded to nearest, that needs no text."""

    W8A8 = "w8a8"
    ROTATED = "w8a8 with rotated inputs"
    W8A16 = "w8a16"


@dataclass(frozen=True)
class ProductOption:
    """One way to quantize a product: the ``decision``, and the ``rewrites`` of tensors by name that carry it out.

    ``uniform`` are the quantizations of all products alike that quantize this one so. An option that is ``apart`` fits
    no other options than those of such a quantization: what it reads is smoothed for the others.
    """

    decision: Decision
    rewrites: Mapping[str, WeightRewrite]
    uniform: tuple[Uniform, ...] = ()
    apart: bool = False


@dataclass(frozen=True)
class _Decided:
    """The options of the product that the model computes as number ``number``.

    ``keys`` are the rewrites that scale keys, by the name of their matrix, which its inputs have decided.
    """

    number: int
    options: tuple[ProductOption, ...]
    keys: Mapping[str, Mapping[str, WeightRewrite]]


@dataclass(frozen=True)
class _Way:
    """A way to quantize a product that is to be evaluated; ``may_round``: by GPTQ, if that gains enough."""

    candidate: QuantizationCandidate
    smoothing: Smoothing
    error: float
    may_round: bool = True
    uniform: tuple[Uniform, ...] = ()
    apart: bool = False


class ProductShare:
    """Which of ``ranks`` decides each product: the one with the least work so far. All of a fold go to one rank.

    Ranks that see the products in the same order agree. Of a product's work, the Hessian of its inputs takes most.
    """

    def __init__(self, spec: Spec, ranks: int = 1):
        self._parameters = spec.parameters
        self._work = [0] * ranks
        self._fold_of = {name: fold for fold in spec.foldable for name in fold.consumers}
        self._rank_of_fold: dict[Fold, int] = {}

    def rank_of(self, names: tuple[str, ...]) -> int:
        """The rank of the next product."""
        fold = self._fold_of.get(names[0])
        rank = self._work.index(min(self._work))
        if fold is not None:
            rank = self._rank_of_fold.setdefault(fold, rank)
        shapes = [self._parameters[name].shape[:: -1 if self._parameters[name].transposed else 1] for name in names]
        self._work[rank] += shapes[0][1] * (shapes[0][1] + sum(shape[0] for shape in shapes))
        return rank


class QuantizationSearch:
    """An observer that decides each product. ``recipe`` must have a calibration.

    With ``ranks``, it decides those of rank ``rank`` alone, see :class:`ProductShare`. :meth:`join` then makes one
    search of those of all ranks. Its decisions are those of one rank, because no product depends on another rank's.

    On the CPU another thread decides while the model goes on, so :meth:`finish` before the model is closed, or
    :meth:`cancel` after an error.

    With ``alternatives``, it collects several options of each product instead, as far as the recipe and the product
    allow them: w8a8, w8a8 with its input rotated, w8a8 with outlier columns, and w8a16. :meth:`result` then takes one
    of them for each product. Codes of GPTQ are kept in temporary files in ``scratch``, by default the system's folder
    for these.
    """

    def __init__(
        self,
        model: OpenedModel,
        recipe: Recipe,
        ops: Backend,
        scratch: Path | None = None,
        alternatives: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ):
        assert recipe.calibration is not None
        self.settings = recipe.calibration
        self.recipe = recipe
        self.spec = model.spec
        self.ops = ops
        self.scratch = scratch
        self.alternatives = alternatives
        self.path = model.path
        self.weights = model.weights()
        self.rank = rank
        self._share = ProductShare(model.spec, ranks)
        self._rank_of: dict[tuple[str, ...], int] = {}
        self._decided = 0
        self._options: list[_Decided] = []
        self._key_heads_of = {heads.key[0]: heads for heads in self.spec.key_heads}
        self._fold_of = {name: fold for fold in self.spec.foldable for name in fold.consumers}
        self._smoothings: dict[tuple[Fold, int], Smoothing] = {}
        self._keys: dict[str, dict[str, WeightRewrite]] = {}
        self._inputs: dict[tuple[str, ...], InputStatistics] = {}
        self._matrices: dict[str, Array] = {}
        self._later = Later(ops)

    def __call__(self, seen: Observation) -> None:
        """Add a part of a product's input, and decide the product with the last one."""
        if self._scheme(seen.tensors[0]) is Scheme.FLOAT:
            return
        if seen.tensors not in self._rank_of:
            self._rank_of[seen.tensors] = self._share.rank_of(seen.tensors)
        if self._rank_of[seen.tensors] != self.rank:
            self._decided += seen.is_last
            return
        inputs = self._inputs.setdefault(seen.tensors, InputStatistics(self.ops, self.settings.rounding == "gptq"))
        inputs.add(seen)
        if seen.is_last:
            self._later.submit(self._add_options, self._decided, seen.tensors, self._inputs.pop(seen.tensors))
            self._decided += 1

    def finish(self) -> None:
        """Wait for the thread that decides; raises its first error."""
        self._later.finish()

    def cancel(self) -> None:
        """Decide no more products, and wait for the one that is being decided."""
        self._later.cancel()

    @property
    def options(self) -> list[tuple[ProductOption, ...]]:
        """The options of all products that were seen."""
        self.finish()
        return [decided.options for decided in self._options]

    def join(self, others: Sequence[QuantizationSearch]) -> None:
        """Take over what the other ranks have decided, in the order in which the model computes the products."""
        for search in [self, *others]:
            search.finish()
        found = [decided for search in [self, *others] for decided in search._options]
        self._options = sorted(found, key=lambda decided: decided.number)

    def _add_options(self, number: int, names: tuple[str, ...], inputs: InputStatistics) -> None:
        options = tuple(self._decide(names, inputs))
        self._options.append(_Decided(number, options, self._keys))
        self._keys = {}
        self._matrices.clear()

    def result(self, choices: Sequence[int] | None = None) -> CalibrationResult:
        """All rewrites, and the decisions for the manifest, with one option of each product: by default the first."""
        chosen = [options[0 if choices is None else choices[i]] for i, options in enumerate(self.options)]
        rewrites: dict[str, WeightRewrite] = {}
        keys = {name: rewrites for decided in self._options for name, rewrites in decided.keys.items()}
        for changes in [*(option.rewrites for option in chosen), *keys.values()]:
            for name, rewrite in changes.items():
                rewrites[name] = rewrites.get(name, NO_REWRITE).merged(rewrite)
        products = [asdict(option.decision) | {"scheme": option.decision.scheme.value} for option in chosen]
        scaled = {"scaled_keys": list(keys)} if keys else {}
        return CalibrationResult(rewrites, {"products": products, **scaled})

    def uniform(self) -> dict[Uniform, list[int]]:
        """The quantizations of all products alike that the recipe allows: the number of each product's option.

        A product that a rule of the recipe excludes from one is quantized by the rule alone there.
        """
        found = {}
        for how in Uniform:
            numbers = [[i for i, option in enumerate(options) if how in option.uniform] for options in self.options]
            if any(numbers):
                ruled = (next(i for i, option in enumerate(options) if option.uniform) for options in self.options)
                found[how] = [of[0] if of else first for of, first in zip(numbers, ruled, strict=True)]
        return found

    def _decide(self, names: tuple[str, ...], inputs: InputStatistics) -> Iterator[ProductOption]:
        rows, input_max = inputs.rows(), inputs.magnitudes()
        if not np.isfinite(input_max).all():
            remedy = "" if self.ops.activation_dtype == np.float32 else "calibrate on the CPU (--device cpu), or "
            raise CheckpointError(
                f"{self.path}: the input of {names[0]} holds a NaN or an infinity on this text, with activations in "
                f"{self.ops.activation_dtype}: {remedy}export the checkpoint again"
            )
        matrices = [self._matrix(name) for name in names]
        some = rows
        if self.alternatives:
            outputs = sum(matrix.shape[0] for matrix in matrices)
            limit = min(max(OPTION_ELEMENTS // outputs, LEAST_OPTION_TOKENS), OPTION_TOKENS)
            some = self.ops.calibration_ops().rows(rows, sample_rows(rows.shape[0], limit))
        evaluator = ErrorEvaluator(self.ops, some, matrices)
        plain = QuantizationCandidate(self._scheme(names[0]))
        rotated = replace(plain, rotation=self.recipe.rotation_of(self.spec, names[0]))
        before = max(evaluator.errors(replace(rotated, scheme=Scheme.W8A8) if self.alternatives else rotated))
        rounding = None
        spilled: dict[int, np.ndarray] = {}  # by the id of the codes, which `rounding` keeps: equal codes share a file
        if inputs.gptq_inputs and self._are_stored(names):
            rounding = GPTQRounding(self.ops, inputs.gptq_inputs, matrices)
        ways = self._ways if self.alternatives else self._one_way
        for way in ways(names, evaluator, plain, rotated, input_max):
            candidate, error = way.candidate, way.error
            rewrites = self._fold_rewrites(names, way.smoothing)
            block = candidate.rotation if candidate.rotation > 1 else None
            rewrite = WeightRewrite(candidate.scheme, outliers=candidate.outliers, rotation=block)
            for name in names:
                rewrites[name] = rewrites.get(name, NO_REWRITE).merged(rewrite)
            may_round = rounding is not None and way.may_round and candidate.outliers is None
            better = rounding.quantize(candidate) if rounding and may_round else None
            if better is not None:
                error = max(evaluator.error(i, weight, candidate.factors) for i, weight in enumerate(better))
                for name, weight in zip(names, better, strict=True):
                    if id(weight.codes) not in spilled:
                        spilled[id(weight.codes)] = self._spill_to_disk(weight.codes)
                    codes = WeightRewrite(codes=spilled[id(weight.codes)], scale=weight.scale)
                    rewrites[name] = rewrites[name].merged(codes)
            kept = () if candidate.outliers is None else tuple(candidate.outliers.tolist())
            how = "nearest" if better is None else "gptq"
            yield ProductOption(
                Decision(names, candidate.scheme, way.smoothing.exponent, kept, how, before, error, candidate.rotation),
                rewrites,
                way.uniform,
                way.apart,
            )
        for name in names:
            if self.settings.smoothing and name in self._key_heads_of:
                self._scale_keys(self._key_heads_of[name], rows)

    def _one_way(
        self,
        names: tuple[str, ...],
        evaluator: ErrorEvaluator,
        plain: QuantizationCandidate,
        rotated: QuantizationCandidate,
        input_max: np.ndarray,
    ) -> Iterator[_Way]:
        """What the recipe decides; ``rotated`` is ``plain`` with the recipe's rotation."""
        keeps_rotation = self.recipe.rotated_inputs is RotatedInputs.ALL
        if keeps_rotation and rotated.rotation > 1 and rotated.scheme is Scheme.W8A8:
            rotated = min(rotated, plain, key=lambda candidate: max(evaluator.errors(candidate)))
        smoothing = self._smoothing(names, evaluator, input_max, rotated)
        start = self._smoothed(names, rotated, smoothing)
        may_keep_columns = self._are_stored(names) and rotated.rotation == 1
        limits = self.settings if may_keep_columns else replace(self.settings, outlier_columns=0)
        candidate, error = select_precision(evaluator, start, limits, input_max, keeps_rotation)
        yield _Way(candidate, smoothing, error)

    def _ways(
        self,
        names: tuple[str, ...],
        evaluator: ErrorEvaluator,
        plain: QuantizationCandidate,
        rotated: QuantizationCandidate,
        input_max: np.ndarray,
    ) -> Iterator[_Way]:
        """The options: first the best w8a8, smoothed if that helps, then it as w8a16, outlier columns, uniform ones.

        All of one fold keep activations within fp16's range by the same factors. A smoothing beyond that changes what
        all products of the fold read. So where there are several, all have the same smoothing, that of the first, and
        the options without it are apart.
        """
        in_range = self._smoothing(names, evaluator, input_max, None)

        def way(
            start: QuantizationCandidate, smoothing: Smoothing = in_range, uniform: tuple[Uniform, ...] = ()
        ) -> _Way:
            candidate = self._smoothed(names, start, smoothing)
            return _Way(candidate, smoothing, max(evaluator.errors(candidate)), not uniform, uniform)

        as_w8a16 = way(replace(plain, scheme=Scheme.W8A16), uniform=(Uniform.W8A16,))
        if plain.scheme is Scheme.W8A8:
            rotates = rotated.rotation > 1
            uniform = [way(plain, uniform=(Uniform.W8A8,) if rotates else (Uniform.W8A8, Uniform.ROTATED))]
            uniform += [way(rotated, uniform=(Uniform.ROTATED,))] if rotates else []
        else:
            uniform = [as_w8a16]
        best = replace(plain, rotation=min(uniform, key=lambda way: way.error).candidate.rotation)
        fold = self._fold_of.get(names[0])
        is_shared = fold is not None and not set(fold.consumers) <= set(names)
        smoothing = self._smoothing(names, evaluator, input_max, best, is_shared)
        apart = is_shared and smoothing.exponent is not None
        common = smoothing if apart else in_range
        yield way(best, smoothing)
        if plain.scheme is Scheme.W8A8:
            yield way(replace(best, scheme=Scheme.W8A16), smoothing)
            count = self.settings.outlier_columns if self._are_stored(names) else 0
            index = largest_inputs(evaluator, self._smoothed(names, plain, common), input_max, count)
            if len(index):
                yield way(replace(plain, outliers=index), common)
            uniform = [*uniform, as_w8a16]
        yield from (replace(found, apart=apart) for found in uniform)

    def _scheme(self, name: str) -> Scheme:
        role = self.spec.parameters[name].role
        return Scheme.FLOAT if role in (Role.ROUTER, Role.ABSORBED) else self.recipe.scheme_of(name, role is Role.HEAD)

    def _are_stored(self, names: Sequence[str]) -> bool:
        """Whether the file holds codes of these matrices; some are quantized when they are loaded."""
        return all(name not in self.spec.tied and not self.spec.parameters[name].transposed for name in names)

    def _spill_to_disk(self, codes: np.ndarray) -> np.ndarray:
        """The codes in a file without a name, which the system removes with the array."""
        try:
            with tempfile.TemporaryFile(dir=self.scratch) as file:
                file.write(np.ascontiguousarray(codes).data)  # not through the map: a full disk would kill the process
                file.flush()
                return np.memmap(file, np.int8, "r+", shape=codes.shape)
        except OSError as error:
            folder = self.scratch or tempfile.gettempdir()
            problem = f"the codes that GPTQ has rounded cannot be kept there until they are written: {error.strerror}"
            remedy = "make room, or name an output folder on another disk"
            raise CheckpointError(f"{folder}: {problem}; {remedy}") from error

    def _smoothing(
        self,
        names: tuple[str, ...],
        evaluator: ErrorEvaluator,
        input_max: np.ndarray,
        plain: QuantizationCandidate | None,
        is_shared: bool = False,
    ) -> Smoothing:
        """The smoothing of a product's fold, found when the first of its consumers is decided; none without a fold.

        ``plain`` is how the product is quantized beside that; None for what fp16's range needs and no more. It is one
        for each rotation, or if it ``is_shared`` by several products one for all.
        """
        fold = self._fold_of.get(names[0])
        if fold is None:
            return Smoothing()
        key = fold, 0 if plain is None else -1 if is_shared else plain.rotation
        if key not in self._smoothings:
            found = Smoothing()
            if plain is not None and self.settings.smoothing:
                rows, tokens = evaluator.rows, FEW_SEARCH_TOKENS if self.alternatives else SEARCH_TOKENS
                if rows.shape[0] > tokens or fold.consumers != names:  # else it knows some of the errors
                    some = self.ops.calibration_ops().rows(rows, sample_rows(rows.shape[0], tokens))
                    evaluator = ErrorEvaluator(self.ops, some, [self._matrix(name) for name in fold.consumers])
                exponents = FEW_EXPONENTS if self.alternatives else EXPONENTS
                found = search_smoothing(evaluator, fold, input_max, plain, exponents)
            self._smoothings[key] = limit_range(found, fold, input_max)
        return self._smoothings[key]

    def _smoothed(
        self, names: tuple[str, ...], start: QuantizationCandidate, smoothing: Smoothing
    ) -> QuantizationCandidate:
        """``start`` with the factors of a smoothing of the product's fold."""
        if smoothing.factors is None:
            return start
        return replace(start, factors=expand_channels(smoothing.factors, self._fold_of[names[0]]))

    def _fold_rewrites(self, names: tuple[str, ...], smoothing: Smoothing) -> dict[str, WeightRewrite]:
        """The rewrites of a product's fold, its producers included."""
        if smoothing.factors is None:
            return {}
        return dict(fold_factors(self.spec, self._fold_of[names[0]], smoothing.factors))

    def _scale_keys(self, heads: KeyHeads, rows: Array) -> None:
        """Choose the factors of a layer's keys, which change the scales of two matrices that are decided already."""
        some = self.ops.calibration_ops().rows(rows, sample_rows(rows.shape[0], SEARCH_TOKENS))
        keys, queries = (self._float_product(tensors, some) for tensors in (heads.key, heads.query))
        with np.errstate(over="ignore", invalid="ignore"):
            factors = key_factors(keys, queries, heads)
        if np.isfinite(factors).all() and (factors != 1).any():
            self._keys[heads.key[0]] = fold_key_factors(self.spec, heads, factors)

    def _float_product(self, tensors: tuple[str, ...], rows: Array) -> np.ndarray:
        """The float product of a matrix, with its bias if ``tensors`` names one: fp32 ``[n, out]`` on the host."""
        calibration_ops = self.ops.calibration_ops()
        weight = calibration_ops.weight(self._matrix(tensors[0]), None)
        product = np.array(self.ops.host(self.ops.linear(calibration_ops.divided(rows, None), weight, fp32=True)))
        return product + self.weights.vector(tensors[1]).astype(np.float32) if len(tensors) > 1 else product

    def _matrix(self, name: str) -> Array:
        """The matrix ``name`` on the device; kept until the current product is decided."""
        if name not in self._matrices:
            calibration_ops = self.ops.calibration_ops()
            weight = self.weights.weight(name)
            assert not isinstance(weight, Int8Weight)
            matrix = self._matrices[name] = calibration_ops.matrix(weight)
            largest = np.max(self.ops.host(calibration_ops.weight_column_absmax(matrix)), initial=0)
            if not largest <= LARGEST_WEIGHT:
                what = f"{largest:.3g}" if np.isfinite(largest) else "a NaN or an infinity"
                problem = f"tensor {name!r} holds {what}"
                raise CheckpointError(f"{self.path}: {problem}; no int8 scale fits: export the checkpoint again")
        return self._matrices[name]


class InputStatistics:
    """Statistics of a product's input: its largest magnitudes, and some rows of each part."""

    def __init__(self, ops: Backend, use_gptq: bool):
        self.ops = ops
        self.gptq_inputs: GPTQInputs | None = None
        self._use_gptq = use_gptq
        self._calibration_ops = ops.calibration_ops()
        self._top: Array | None = None
        self._rows: list[Array] = []

    def add(self, seen: Observation) -> None:
        self._top = self._calibration_ops.column_absmax(seen.x, self._top)
        index = sample_rows(seen.x.shape[0], max(EVALUATION_TOKENS // seen.num_batches, 1), seed=seen.batch_index)
        self._rows.append(self._calibration_ops.rows(seen.x, index))
        if self._use_gptq:
            self.gptq_inputs = self.gptq_inputs or GPTQInputs(self.ops, seen.num_batches)
            self.gptq_inputs.add(seen.x)

    def rows(self) -> Array:
        """Up to ``EVALUATION_TOKENS`` rows, drawn from all parts, fp32 ``[n, in]``."""
        return self._calibration_ops.joined(self._rows)

    def magnitudes(self) -> np.ndarray:
        """``max|x|`` of each input, fp32 ``[in]``."""
        return np.asarray(self.ops.host(self._top))


def select_precision(
    evaluator: ErrorEvaluator,
    candidate: QuantizationCandidate,
    settings: CalibrationSettings,
    input_max: np.ndarray,
    keeps_rotation: bool = False,
) -> tuple[QuantizationCandidate, float]:
    """``candidate``, or the first alternative that brings the largest error of the products to ``settings.max_error``.

    Returns it with that error. w8a16 is the last resort, and taken whatever its error; its input is rotated only if it
    ``keeps_rotation``. ``input_max`` is ``max|x|`` per input ``[in]``, before smoothing.
    """
    error = max(evaluator.errors(candidate))
    if candidate.scheme is not Scheme.W8A8 or not 0 < settings.max_error < error:
        return candidate, error
    index = largest_inputs(evaluator, candidate, input_max, settings.outlier_columns)
    alternatives = [replace(candidate, outliers=index)] if len(index) else []
    rotation = candidate.rotation if keeps_rotation else 1
    for alternative in [*alternatives, replace(candidate, scheme=Scheme.W8A16, rotation=rotation)]:
        error = max(evaluator.errors(alternative))
        if error <= settings.max_error:
            break
    return alternative, error


def largest_inputs(
    evaluator: ErrorEvaluator, candidate: QuantizationCandidate, input_max: np.ndarray, count: int
) -> np.ndarray:
    """The ``count`` inputs that are largest after smoothing and whose weights fp16 can hold, int32, ascending."""
    if count == 0:
        return np.empty(0, np.int32)
    factors = np.float32(1) if candidate.factors is None else candidate.factors
    absmax = evaluator.calibration_ops.weight_column_absmax
    weight_max = np.max([evaluator.ops.host(absmax(matrix)) for matrix in evaluator.matrices], axis=0) * factors
    size = np.where(weight_max <= FP16_MAX, input_max / factors, 0)
    index = np.argsort(-size, kind="stable")[:count]
    return np.sort(index[size[index] > 0]).astype(np.int32)
