"""``ebb vm show`` and ``ebb vm explain``: why a VM has its size, what could be taken, what is blocked, what helps."""

from __future__ import annotations

from ebbtide.cli.commands.options import Asking, Showing, VMName, label_words
from ebbtide.cli.commands.vms import VMS, amounts, ditto
from ebbtide.cli.output import clock, print_table, shown, size
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Explanation, VMExplanation
from ebbtide.messages.vms import ClusterVM, OnPreemption


def explain(name: VMName, *, to: Asking) -> None:
    """Say why a VM has its size, what could still be taken, which layers are blocked, and what would help."""
    found = to.ask(lambda client: client.explain(name))
    to.say(found, lambda: print_explanation(name, found))


def vm(name: VMName, *, to: Showing) -> None:
    """Show one VM: sizes and where they come from, layers, labels, what happened last.

    Its version is in -o json and -o wide.
    """
    found = to.ask(lambda client: client.vm(name))
    if to.for_programs:
        to.say(found, list)
        return
    told = to.ask(lambda client: client.explain(name))
    VMS.print([found], wide=to.wide)
    _print_details(found, told)


def print_explanation(name: str, found: VMExplanation) -> None:
    """The sentence first; then sizes, layers, what helps, and what was decided."""
    told = found.explanation
    if told is None:
        print(shown(f"{name} is {found.state}: {found.sentence}"))
        print(shown(f"its host's own word cannot be had: {found.unreachable}"))
    else:
        _print_told(told)
    print(shown(_on_preemption(name, found)))
    if found.plans:
        print("\nat work on it, or waiting for its host:")
        for sentence in found.plans:
            print(shown(f"  {sentence}"))
    if found.events:
        print("\nevents:")
        print_table(("at", "kind", "what happened"), ((clock(e.at), e.kind, e.sentence) for e in found.events), "")


def _print_details(vm: ClusterVM, told: VMExplanation) -> None:
    """What does not fit into a row of a list, a line each."""
    rows = [("labels", label_words(vm.labels))]
    explanation = told.explanation
    if explanation is None:
        rows.append(("size", f"its host's own word cannot be had: {told.unreachable}"))
    else:
        rows += [("size", explanation.sentence), ("can give", f"{explanation.deflatable.vector()} more")]
        for layer in Layer:
            usable = [row.mechanism.value for row in explanation.findings if row.layer is layer and row.available]
            rows.append((f"{layer.value} layer", ", ".join(usable) or "nothing usable: see `ebb vm explain`"))
    rows.append(("without room", _on_preemption(vm.name, told).strip().removeprefix("where there is no room for it: ")))
    if told.events:
        last = told.events[-1]
        rows.append(("last event", f"{clock(last.at)} {last.kind}: {last.sentence}"))
    print()
    for what, said in rows:
        print(shown(f"{what:<17} {said}"))


def _on_preemption(name: str, found: VMExplanation) -> str:
    if (waits := found.preempted) is not None:
        return (
            f"\n{name} was preempted at {clock(waits.at)} (reason {waits.reason}) and keeps its disk; {waits.sentence}"
        )
    if found.on_preemption is OnPreemption.DELETE:
        return "\nwhere there is no room for it: it is deleted with its disk"
    if found.on_preemption is OnPreemption.SUSPEND:
        return (
            f"\nwhere there is no room for it: within {found.preemption_notice_s:g} s it is told and its memory saved, "
            "and it goes on where it was when there is room; without disk or time for that it is stopped"
        )
    return (
        f"\nwhere there is no room for it: it has {found.preemption_notice_s:g} s to end its work, is stopped, "
        "keeps its disk, and is started again when there is room"
    )


def _print_told(told: Explanation) -> None:
    print(shown(told.sentence))
    if told.mode is not HostMode.ACTIVE:
        because = f" ({told.mode_reason})" if told.mode_reason else ""
        print(shown(f"its host {told.vm.host} is {told.mode}{because}"))
    if told.vm.throttled_share is not None:
        print(f"its quota stopped a vCPU in {told.vm.throttled_share:.0%} of the periods, lately")
    if (soon := told.vm.not_yet) is not None:
        print(shown(f"it is {soon.why}: {soon.memory_mib:g} MiB can be taken later, probably in {soon.in_s:g} s"))
    if told.vm.pressure:
        print(shown(f"it is shrunk no further: {told.vm.pressure}"))
    print("\nsizes:")
    print_table(("what", "size"), _sizes(told), "")
    print("\nlayers:")
    print_table(
        ("layer", "mechanism", "now", "why"),
        ditto(
            (row.layer.value, row.mechanism.value, "available" if row.available else "BLOCKED", row.reason)
            for row in told.findings
        ),
        "nothing is known of them",
    )
    fixes = _fixes(told)
    if fixes:
        print("\nTo put it right; XML counts from the VM's next start:")
    for text, mechanisms in fixes.items():
        print(shown(f"\n[{', '.join(mechanisms)}]\n{text}"))
    if told.resizes:
        last = told.resizes[-1]
        print(shown(f"\nlast resize ({last.request_id}, {clock(last.at)}):"))
        print_table(
            ("layer", "resource", "asked", "promised", "verified", "seconds", "reason"),
            ditto((row.layer.value, row.resource, *amounts(row), row.reason) for row in last.outcome.ledger),
            last.outcome.sentence,
        )
    print("\ndecisions:")
    print_table(
        ("at", "kind", "what and why"),
        (
            (clock(row.at), row.kind, row.sentence + (f" ({row.repeated + 1} times)" if row.repeated else ""))
            for row in told.decisions
        ),
        "none since its agent was started",
    )


def _fixes(told: Explanation) -> dict[str, list[str]]:
    """What opens the blocked mechanisms: each text once, with those that it is for."""
    found: dict[str, list[str]] = {}
    for row in told.findings:
        for text in filter(None, row.fix.split("\n\n")):
            if not row.available:
                found.setdefault(text, []).append(row.mechanism.value)
    return found


def _sizes(told: Explanation) -> list[tuple[str, str]]:
    vm = told.vm
    rows: list[tuple[str, Vector | None]] = [
        ("nominal", vm.nominal),
        ("minimum", vm.minimum),
        ("ceiling", vm.ceiling),
        ("committed", vm.current),
        ("what it holds now", told.bound),
        ("could still be taken", told.deflatable),
    ]
    return [(what, size(vector)) for what, vector in rows if vector is not None]
