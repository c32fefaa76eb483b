"""How the operators and parameters of a module are cut, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite.common.layouts.layout import Layout
from hvdlite.common.layouts.operators import Operator, Strategy
from hvdlite.common.layouts.propagation import Alternatives, Choice
from hvdlite.torch.sharding.planning.tracing import Traced


@dataclass(frozen=True)
class Planned:
    """How an operator or a parameter is cut, and the bytes that a rank receives for it.

    `strategy` has the cuts of each input of an operator, those of the tensor of a parameter.
    `memory`: the bytes of a rank's part of the result, or of the parameter.
    """

    strategy: Strategy
    bytes: int
    memory: int = 0


@dataclass(frozen=True)
class Found:
    """The trace of a part, its operators, and how each of them is cut."""

    traced: Traced
    operators: list[Operator]
    choices: dict[str, Choice]
    ranks: int


class Plan(dict[str, Planned]):
    """What `plan` returns: by the names of operators, then of parameters; prints as a table.

    `layouts` are those of parameters and buffers by name, `inputs` of the inputs in order, and
    `outputs` of those outputs that a strategy was given for, by their numbers.
    """

    def __init__(
        self,
        planned: Mapping[str, Planned],
        layouts: dict[str, Layout],
        inputs: list[Layout],
        outputs: dict[int, Layout],
        found: Found | None = None,
    ) -> None:
        super().__init__(planned)
        self.layouts = layouts
        self.inputs = inputs
        self.outputs = outputs
        # What the plan was made of, with which the part is put together.
        self.found = found

    @property
    def bytes(self) -> int:
        """What a rank receives in one forward pass, at most."""
        return sum(each.bytes for each in self.values())

    @property
    def memory(self) -> int:
        """The bytes of parameters that a rank holds."""
        operators = self.found.choices if self.found is not None else {}
        return sum(each.memory for name, each in self.items() if name not in operators)

    def alternatives(self, name: str) -> dict[Strategy, int]:
        """Return what each strategy of an operator would cost, all others staying as they are.

        That is the bytes that a rank receives before, in and after the operator. The one that it
        has comes first, then the others, the cheapest first. Raises `KeyError` for what is no
        operator.
        """
        if self.found is None or name not in self.found.choices:
            raise KeyError(f"{name!r} is no operator of this plan; print it to see their names")
        return self._alternatives().of(name)

    def _alternatives(self) -> Alternatives:
        assert self.found is not None
        return Alternatives(self.found.operators, self.found.choices, self.found.ranks)

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        head = f"{'':{width}}  {'bytes':>12}  {'memory':>12}  strategy"
        strategies = {name: str(each.strategy) for name, each in self.items()}
        longest = max(map(len, strategies.values()), default=0)
        others = self._cheapest_others()
        lines = [
            f"{name:{width}}  {each.bytes:>12}  {each.memory:>12}  "
            f"{strategies[name]:{longest}}  {others.get(name, '')}".rstrip()
            for name, each in self.items()
        ]
        total = (
            f"a rank holds {self.memory} bytes of parameters, and receives {self.bytes} in a "
            "forward pass"
        )
        return "\n".join([f"{head:{width + 40 + longest}}otherwise".rstrip(), *lines, total])

    def _cheapest_others(self) -> dict[str, str]:
        """Return for each operator that computes what the cheapest other strategy costs more."""
        found = self.found
        if found is None:
            return {}
        alternatives = self._alternatives()
        others = {}
        for operator in found.operators:
            if not operator.is_view:
                (_, cost), *rest = alternatives.of(operator.name).items()
                if rest:
                    others[operator.name] = f"{rest[0][1] - cost:+} by {rest[0][0]}"
        return others
