"""Training and prefill of transformers' models, by each attention that they can be asked for.

Random weights, bf16, as many layers as fit a short run. Each implementation first gives logits, which are held beside
those of ``eager`` in fp32: one that computes something else is not timed. Then they take turns.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tabulate import tabulate

from bench.results import Environment, dump, environment, read
from multiattn.tune.timing import Budget, Contestant, CudaClock, Timing, measure

SCHEMA = 2
Mode = Literal["training", "prefill"]
MODES: tuple[Mode, ...] = get_args(Mode)
IMPLEMENTATIONS = ("multiattn", "sdpa", "eager", "flex_attention", "flash_attention_4")
"""Names of transformers' `attn_implementation`; ours comes first."""
BUDGET = Budget(rounds=9, sample_ms=1.0, warmup_ms=1.0)
SLACK = 3.0
"""How much farther from fp32 than bf16 eager's an implementation's logits may be before they count as other ones."""
CHECKED = 2048
"""Tokens of the sequence that logits are compared on."""

_SIZES: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": False,
}
_HEADS_128 = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
_HEADS_64 = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of transformers, and the batch that it gets."""

    name: str
    kind: str
    """The name of its class before ``Config`` and ``ForCausalLM``."""
    options: Mapping[str, Any]
    batch: int
    seq: int

    def make(self, device: str = "cpu") -> Any:
        """The model with random weights, fp32."""
        import transformers

        config = getattr(transformers, f"{self.kind}Config")(**_SIZES, **self.options)
        torch.manual_seed(0)
        with torch.device(device):
            return getattr(transformers, f"{self.kind}ForCausalLM")(config)


_LLAMA = {"intermediate_size": 5632}
_GEMMA = {**_LLAMA, **_HEADS_128, "query_pre_attn_scalar": 128, "sliding_window": 1024}
_GPT_OSS = {
    **_HEADS_64, "intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 128,
}  # fmt: skip
_MLA = {"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 8}
"""DeepSeek's own widths of heads, and no experts."""
MODELS = (
    Model(name="llama D128 4k", kind="Llama", options={**_LLAMA, **_HEADS_128}, batch=2, seq=4096),
    Model(name="llama D64 4k", kind="Llama", options={**_LLAMA, **_HEADS_64}, batch=2, seq=4096),
    Model(name="llama D128 16k", kind="Llama", options={**_LLAMA, **_HEADS_128}, batch=1, seq=16384),
    Model(name="gemma2 D128 4k", kind="Gemma2", options=_GEMMA, batch=2, seq=4096),
    Model(name="gpt-oss D64 4k", kind="GptOss", options=_GPT_OSS, batch=2, seq=4096),
    Model(name="deepseek-v3 D192/128 4k", kind="DeepseekV3", options={**_LLAMA, **_MLA}, batch=2, seq=4096),
)
"""The Llama of the training figures in docs/hopper.md, and models of its size: softcap and windows, sinks, latents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One implementation in one model and mode: tokens of a second, or why there are none."""

    model: str
    mode: str
    implementation: str
    tokens_per_s: float | None = None
    time_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    logits_error: float | None = None
    """The root mean square error of its logits over that of bf16 eager's, both against fp32 eager's."""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRun:
    """The rows of one run, and where it ran."""

    environment: Environment
    versions: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[ModelRow, ...]


def table_text(runs: Iterable[ModelRun], form: str = "simple") -> str:
    """A row for each model and mode, a column of thousands of tokens a second for each implementation."""
    cells: dict[tuple[str, str], dict[str, ModelRow]] = {}
    for row in sorted((row for it in runs for row in it.rows), key=_place):
        cells.setdefault((row.model, row.mode), {})[row.implementation] = row
    lines = []
    for names, its in cells.items():
        ratio = over_others(its.get(IMPLEMENTATIONS[0]), its.values())
        texts = (rate_text(its.get(name)) for name in IMPLEMENTATIONS)
        lines.append((*names, *texts, "" if ratio is None else f"{ratio:.3f}"))
    headers = ("model", "mode", *IMPLEMENTATIONS, "multiattn / best")
    return tabulate(lines, headers=headers, tablefmt=form, disable_numparse=True)


def _place(row: ModelRow) -> int:
    """Where its model is among `MODELS`; others come last."""
    return next((place for place, it in enumerate(MODELS) if it.name == row.model), len(MODELS))


def merged(runs: Sequence[ModelRun], new: ModelRun) -> tuple[ModelRun, ...]:
    """The runs with a new one, whose models are no longer those of an earlier one: all of a model is of one run."""
    timed = {row.model for row in new.rows}
    kept = (replace(it, rows=tuple(row for row in it.rows if row.model not in timed)) for it in runs)
    return (*(it for it in kept if it.rows), new)


def save(runs: Sequence[ModelRun], path: Path) -> None:
    """Write runs as JSON, a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [{"environment": asdict(it.environment), "versions": it.versions} for it in runs]
    rows = [{"run": place, **asdict(row)} for place, it in enumerate(runs) for row in it.rows]
    path.write_text(dump({"schema": SCHEMA, "command": "python -m bench models", "runs": made, "rows": rows}))


def load(path: Path) -> tuple[ModelRun, ...]:
    """The runs that `save` wrote; InputError for another file."""

    def parse(data: dict[str, Any]) -> tuple[ModelRun, ...]:
        rows: list[list[ModelRow]] = [[] for _ in data["runs"]]
        for it in data["rows"]:
            rows[it.pop("run")].append(ModelRow(**it))
        return tuple(
            ModelRun(environment=Environment(**it["environment"]), versions=it["versions"], rows=tuple(its))
            for it, its in zip(data["runs"], rows, strict=True)
        )

    return read(path, SCHEMA, parse)


def rate_text(row: ModelRow | None) -> str:
    """Thousands of tokens a second."""
    if row is None:
        return ""
    return f"{row.tokens_per_s / 1e3:.1f}k" if row.tokens_per_s is not None else "no"


def over_others(row: ModelRow | None, rows: Iterable[ModelRow]) -> float | None:
    """Its rate over that of the fastest other in the same model and mode; None where one of them has none."""
    if row is None or row.tokens_per_s is None:
        return None
    alike = (it for it in rows if (it.model, it.mode) == (row.model, row.mode) and it is not row)
    others = [it.tokens_per_s for it in alike if it.tokens_per_s is not None]
    return row.tokens_per_s / max(others) if others else None


# ---------------------------------------------------------------- one model


def time_model(model: Model, clock: CudaClock) -> list[ModelRow]:
    """Check every implementation in a model, then time those that pass, in turns."""
    gc.collect()  # of the model before: its errors may hold tensors
    torch.cuda.empty_cache()
    built = model.make("cuda")
    ids = torch.randint(0, _SIZES["vocab_size"], (model.batch, model.seq), device="cuda")
    errors, faults = _logits_errors(built, ids[:, :CHECKED], IMPLEMENTATIONS)
    rows: list[ModelRow] = []
    for mode in MODES:
        built.train(mode == "training")
        step = functools.partial(_step, built, ids, mode)
        able = (name for name in IMPLEMENTATIONS if name not in faults)
        calls = {name: Contestant(call=step, context=functools.partial(_asking, built, name)) for name in able}
        outcomes: Mapping[str, Timing | Exception] = measure(calls, clock, regime="call", budget=BUDGET)
        rows += [_row(model, mode, it, errors.get(it), faults.get(it) or outcomes[it]) for it in IMPLEMENTATIONS]
        built.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return rows


def _row(
    model: Model, mode: Mode, name: str, logits_error: float | None, outcome: Timing | Exception | str
) -> ModelRow:
    named: dict[str, Any] = {"model": model.name, "mode": mode, "implementation": name, "logits_error": logits_error}
    if not isinstance(outcome, Timing):
        told = outcome if isinstance(outcome, str) else f"{type(outcome).__name__}: {outcome}"
        return ModelRow(**named, error=told[:400])
    rate = model.batch * model.seq / outcome.time_ms * 1e3
    times = {name: getattr(outcome, name) for name in ("time_ms", "low_ms", "high_ms")}
    return ModelRow(**named, tokens_per_s=rate, **times)


@contextlib.contextmanager
def _asking(model: Any, implementation: str) -> Iterator[None]:
    """The model asks for this attention from here on."""
    model.set_attn_implementation(implementation)
    yield


def _step(model: Any, ids: torch.Tensor, mode: Mode) -> None:
    """One training step without the optimizer, or one prefill."""
    if mode == "prefill":
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
        return
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


def _logits_errors(
    model: Any, ids: torch.Tensor, implementations: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """How far each one's logits are from fp32, over how far bf16 eager's are; and why some are left out.

    The model is bf16 afterwards.
    """
    model.eval()

    @torch.no_grad()
    def logits(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        found: torch.Tensor = model(ids, use_cache=False).logits.float()
        return found

    truth = logits("eager")
    model.to(torch.bfloat16)
    allowed = float((logits("eager") - truth).square().mean().sqrt())
    errors: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name in implementations:
        try:
            errors[name] = float((logits(name) - truth).square().mean().sqrt()) / allowed
        except Exception as error:  # broad: a model may be anybody's code; its error is its row
            faults[name] = f"{type(error).__name__}: {error}"
            continue
        if not errors[name] <= SLACK:
            told = f"its logits are {errors[name]:.3g} times as far from fp32 as eager's"
            faults[name] = f"computes something else: {told}"
    return errors, faults


def run(models: Sequence[Model], tell: Callable[[ModelRun], None]) -> ModelRun:
    """Time models on the current GPU; `tell` gets the run after each, with all before it."""
    import transformers

    from multiattn.integrations.transformers import register

    register()
    clock = CudaClock()
    done = ModelRun(environment=environment(), versions={"transformers": transformers.__version__}, rows=())
    for model in models:
        done = replace(done, rows=(*done.rows, *time_model(model, clock)))
        tell(done)
    return done
