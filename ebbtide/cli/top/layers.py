"""Lines about one VM: what each layer can do with it and what each gave last."""

from __future__ import annotations

from ebbtide.cli.top.drawing import Line, cleaned, figure
from ebbtide.deflation.ledger import Layer
from ebbtide.messages.explanations import Explanation, VMExplanation
from ebbtide.messages.operations import LedgerRow


def layer_lines(told: VMExplanation) -> list[Line]:
    """The sentences first, then a paragraph a layer in the order in which they are asked."""
    found: list[Line] = [[(cleaned(told.sentence), "plain")]]
    explanation = told.explanation
    if explanation is None:
        return [*found, [(cleaned(told.unreachable or "it is on no host"), "alarm")]]
    if explanation.sentence != told.sentence:
        found.append([(cleaned(explanation.sentence), "plain")])
    left = explanation.deflatable
    found.append([(f"can still give {left.vector()}", "deflatable")])
    for layer in Layer:
        found += _layer(layer, explanation)
    return found + [[(cleaned(plan), "bold")] for plan in told.plans]


def _layer(layer: Layer, explanation: Explanation) -> list[Line]:
    line: Line = [(f"{layer.value:<12}", "bold")]
    usable = [row.mechanism for row in explanation.findings if row.layer is layer and row.available]
    line.append((f"{', '.join(usable) or 'nothing usable'}", "plain" if usable else "alarm"))
    found = [line]
    # One reason for several mechanisms stands once.
    blocked: dict[str, list[str]] = {}
    for row in explanation.findings:
        if row.layer is layer and not row.available:
            blocked.setdefault(row.reason, []).append(row.mechanism)
    found += [[(f"  not {', '.join(names)}: {cleaned(why)}", "dim")] for why, names in blocked.items()]
    if explanation.resizes:
        last = explanation.resizes[-1].outcome
        found += [[(f"  last {_amounts(row)}", "held")] for row in last.ledger if row.layer is layer]
    return found


def _amounts(row: LedgerRow) -> str:
    why = f": {cleaned(row.reason)}" if row.reason else ""
    return f"{row.resource}: asked {figure(row.asked)}, verified {figure(row.verified)} in {row.seconds:.1f} s{why}"
