"""What was measured, as plain frozen values: times in seconds, sizes in bytes."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "OURS",
    "Builds",
    "Calls",
    "ContenderFigures",
    "Machine",
    "Memory",
    "ModelFigures",
    "Report",
    "Spread",
    "Start",
]

OURS = "hatch-aoti"


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of `count` measurements, and the quartiles below and above it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise measurements; there must be at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


@dataclasses.dataclass(frozen=True)
class Start:
    """The way to the first result in a fresh process.

    `framework` ends when torch (or ONNX Runtime) has been imported; `load` is from there to a model that can be called,
    None where it cannot be told from the first call; `result` is load and first call together, and `total` all of it
    from the start of the process, Python's own start included.
    """

    framework: Spread
    load: Spread | None
    result: Spread
    total: Spread


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one process takes after its first result, and what four that live at the same time take together.

    `pss` counts what several processes share once, divided among them; `private` only what is each process's own.
    """

    pss: int
    private: int
    four_pss: int
    four_private: int

    @property
    def growth(self) -> float:
        """How much more four processes take than one."""
        return self.four_pss / self.pss


@dataclasses.dataclass(frozen=True)
class ContenderFigures:
    """One way to run one model. `error` says why it could not be measured (to the end), and is empty otherwise.

    `rounds` are the median latencies of each round; `difference` says how its answer differs from the reference, and is
    empty where it does not; None where it was not compared.
    """

    key: str
    name: str
    error: str = ""
    artifact_bytes: int | None = None
    start: Start | None = None
    memory: Memory | None = None
    latency: Spread | None = None
    rounds: tuple[float, ...] = ()
    difference: str | None = None
    max_error: float | None = None

    @property
    def sound(self) -> bool:
        """Whether it was measured to the end and gave the right answer."""
        return not self.error and self.difference == ""


@dataclasses.dataclass(frozen=True)
class Calls:
    """What a call of a model costs with one thread: PyTorch's bare C++ loader, checked, PyTorch's own object."""

    bare: Spread
    validated: Spread
    stock: Spread
    validated_to_bare: float
    validated_to_stock: float


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """One model: the inputs it was called with, and the contenders."""

    name: str
    inputs: tuple[str, ...]
    contenders: tuple[ContenderFigures, ...]
    calls: Calls | None = None

    def find(self, key: str) -> ContenderFigures | None:
        """Return the figures of one contender, if it was measured."""
        return next((item for item in self.contenders if item.key == key), None)

    def relative_latency(self, key: str) -> float | None:
        """Return a contender's latency in units of hatch-aoti's: the median of the ratios of each round."""
        return _ratio(self.find(key), self.find(OURS))

    @property
    def best_other(self) -> ContenderFigures | None:
        """The fastest of the contenders with right answers, hatch-aoti aside."""
        others = [item for item in self.contenders if item.key != OURS and item.sound and item.latency]
        return min(others, key=lambda item: statistics.median(item.rounds), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data, ratios included."""
        ours, stock, best = self.find(OURS), self.find("aotinductor"), self.best_other
        ratios: dict[str, Any] = {
            "latency_to_best_other": _ratio(ours, best),
            "best_other": None if best is None else best.key,
            "first_result_to_aotinductor": None,
        }
        if ours and stock and ours.start and stock.start:
            ratios["first_result_to_aotinductor"] = ours.start.result.median / stock.start.result.median
        contenders = [
            {
                **dataclasses.asdict(item),
                "agrees": None if item.difference is None else not item.difference,
                "memory_growth": None if item.memory is None else item.memory.growth,
                "relative_latency": self.relative_latency(item.key),
            }
            for item in self.contenders
        ]
        return {**dataclasses.asdict(self), "contenders": contenders, "ratios": ratios}


def _ratio(one: ContenderFigures | None, other: ContenderFigures | None) -> float | None:
    if one is None or other is None or not (one.rounds and other.rounds):
        return None
    return statistics.median(a / b for a, b in zip(one.rounds, other.rounds, strict=False))


@dataclasses.dataclass(frozen=True)
class Builds:
    """How long a project's wheel takes to build, next to a script that compiles its models with stock AOTInductor.

    `cold` with an empty cache, `one_changed` when one model (`changed`) has changed since, `unchanged` when nothing
    has; the script with an empty and a full inductor cache, None where it failed.
    """

    models: int
    changed: str
    cold: float
    one_changed: float
    unchanged: float
    script_cold: float | None
    script_warm: float | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data, ratios to the cold script included."""
        ratios = {
            f"{name}_to_script": None if self.script_cold is None else getattr(self, name) / self.script_cold
            for name in ("cold", "one_changed", "unchanged")
        }
        return {**dataclasses.asdict(self), "ratios": ratios}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and with what the figures were made."""

    cpu: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    hatch_aoti: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything. `subject` is the project or package; a package has neither wheel nor builds to measure."""

    subject: str
    command: str
    machine: Machine
    models: tuple[ModelFigures, ...]
    wheel_bytes: int | None = None
    builds: Builds | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data; docs/benchmark.md describes it."""
        return {
            "subject": self.subject,
            "command": self.command,
            "machine": dataclasses.asdict(self.machine),
            "wheel_bytes": self.wheel_bytes,
            "models": [model.to_json() for model in self.models],
            "builds": None if self.builds is None else self.builds.to_json(),
        }
