"""The TOML file of an experiment, read strictly: what is unknown or cannot be is an error that names its key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from ebbtide.simulator.errors import ExperimentError, InvalidParameter
from ebbtide.simulator.experiments import plotting
from ebbtide.simulator.experiments.experiment import BOUND, RESERVED, Axis, Experiment, Policy, Value
from ebbtide.simulator.experiments.fields import Given
from ebbtide.simulator.experiments.model import INPUTS, MADE, MODELS, OF_FORMAT, POLICY, WITH_JOBS, Input
from ebbtide.simulator.inputs.recognise import another

TABLES: Final = ("experiment", INPUTS, "settings", "sweep", "plots")
#: The setting that ``--rows`` sets.
ROWS: Final = "rows"
#: Keys of [experiment] that ``--set`` finds without their table.
OWN: Final = ("name", "model", "description", "policies", "seeds", "metrics")
#: Values of one axis at most; a range with a slip in its step is no sweep.
_MOST_VALUES: Final = 10_000
#: Runs at most.
_MOST_RUNS: Final = 1_000_000


def read(
    path: Path, overrides: Mapping[str, Any] | None = None, inputs: Mapping[str, str | Path] | None = None
) -> Experiment:
    """The experiment of a file.

    :param overrides: instead of what stands there, by key: ``settings.servers``, ``sweep.low_share``,
        ``experiment.seeds``, or just ``servers``, which is an axis where one has that name.
    :param inputs: paths of inputs by name, relative to the current directory; others are relative to the file.
    :raises ExperimentError: the file cannot be read, or something in it cannot be; names the key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError("file", f"cannot be read: {error.strerror}", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ExperimentError("file", "is no text in UTF-8", file=str(path)) from error
    except (ValueError, RecursionError) as error:
        # Also of numbers with thousands of digits, and of tables in tables in tables.
        raise ExperimentError("file", f"is no TOML: {error}", file=str(path)) from error
    try:
        return parsed(document, path.parent, overrides, inputs)
    except InvalidParameter as error:
        raise ExperimentError(error.field, error.problem, file=str(path)) from error


def parsed(
    document: Mapping[str, Any],
    directory: Path,
    overrides: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str | Path] | None = None,
) -> Experiment:
    """The experiment of a document as TOML gives it.

    :param directory: what paths are relative to.
    :raises InvalidParameter: names the key, and what is allowed.
    """
    written, left_out = _without_made(document, inputs or {})
    document, set_by_hand = _overridden(written, overrides or {})
    by_hand = {places[-1] for places in set_by_hand.values()}
    document, of_format = _in_another_format(document, written, inputs or {}, by_hand)
    whole = Given(document)
    own = Given(whole.table("experiment"), "experiment.")
    name = own.text("name")
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise own.wrong("name", f"must be of letters, digits, '-', '_' and '.', but is {name!r}")
    settings = _settings(whole.table("settings", {}), "settings")
    model = own.text("model")
    if ROWS in settings and model in MODELS and model not in WITH_JOBS:
        raise InvalidParameter(
            f"settings.{ROWS}",
            f"(--rows) asks for a row for each job, and the model {model} has no jobs; those of {', '.join(WITH_JOBS)} "
            "can be written",
        )
    axes = tuple(_axes(whole.table("sweep", {}), "sweep"))
    metrics = own.texts("metrics", ())
    if len(set(metrics)) < len(metrics):
        raise own.wrong("metrics", "has a metric twice")
    policies = tuple(_policies(own))
    _apart(settings, axes, policies)
    for key, places in set_by_hand.items():
        if policies and all(_states(policy.settings, places) for policy in policies):
            raise InvalidParameter(
                key, "would count nowhere: each of experiment.policies states it, and goes before it"
            )
    for axis in axes:
        _replaced(settings, axis.name)
    experiment = Experiment(
        name=name,
        model=model,
        description=own.text("description", ""),
        inputs=_inputs(whole.table(INPUTS, {}), directory, inputs or {}, model),
        settings=settings,
        axes=axes,
        policies=policies,
        seeds=_seeds(own),
        metrics=metrics,
        plots=(),
        notes=left_out + of_format,
    )
    given_plots = whole.value("plots", [])
    own.end()
    whole.end()
    count = len(experiment.seeds) * max(len(policies), 1)
    for axis in axes:
        count *= len(axis.values)
    if count > _MOST_RUNS:
        raise InvalidParameter("sweep", f"is {count} runs; at most {_MOST_RUNS} are allowed")
    return plotting.with_plots(experiment, given_plots)


def value_of(word: str) -> Any:
    """A word of a command line: TOML where it is some, else a text. Raises InvalidParameter."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except (ValueError, RecursionError) as error:
        if word.startswith(("[", "{")):
            why = f"{word[:60]!r} is no TOML ({error}): texts in it stand in quotes, as in '[\"random\"]'"
            raise InvalidParameter("--set", why) from error
        return word


def _overridden(
    document: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The document with what is set by hand.

    :returns: of what is in settings or axes by that, the names of its tables and its own, too, by its key.
    """
    found = {name: dict(part) if isinstance(part, Mapping) else part for name, part in document.items()}
    places: dict[str, tuple[str, ...]] = {}
    for key, value in overrides.items():
        table, _, rest = key.partition(".")
        if table not in TABLES or not rest:
            if key in OWN:
                table = "experiment"
            elif _has(found.get("sweep"), key):
                table, value = "sweep", value if isinstance(value, list | Mapping) else [value]
            elif isinstance(value, list | Mapping) and _has_one(found.get("settings"), key):
                table = "sweep"
            else:
                table = "settings"
            rest = key
        if table == "plots":
            raise InvalidParameter(key, "cannot be set; plots stand in the file")
        if not isinstance(found.setdefault(table, {}), Mapping):
            raise InvalidParameter(key, f"cannot be set: {table} is no table")
        place = found[table]
        # A quoted key with dots is one key.
        *between, last = [rest] if rest in place else rest.split(".")
        for step in between:
            below = place.get(step)
            if below is not None and not isinstance(below, Mapping):
                raise InvalidParameter(key, f"cannot be set: {step} is no table")
            place[step] = dict(below or {})
            place = place[step]
        place[last] = value
        if table in ("settings", "sweep"):
            places[key] = *between, last
    return found, places


def _states(settings: Mapping[str, Any], places: Sequence[str]) -> bool:
    """Whether settings have a value there; a table is merged with another."""
    found: Any = settings
    for step in places:
        if not isinstance(found, Mapping) or step not in found:
            return False
        found = found[step]
    return not isinstance(found, Mapping)


def _has(sweep: Any, key: str) -> bool:
    """Whether a sweep has an axis of this name."""
    if isinstance(sweep, Mapping) and key in sweep:
        return True
    for step in key.split("."):
        if not isinstance(sweep, Mapping) or step not in sweep:
            return False
        sweep = sweep[step]
    return True


def _has_one(settings: Any, key: str) -> bool:
    """Whether settings have a single value under this name, of which several make an axis."""
    for step in (key,) if isinstance(settings, Mapping) and key in settings else key.split("."):
        if not isinstance(settings, Mapping) or step not in settings:
            return False
        settings = settings[step]
    return not isinstance(settings, list | Mapping)


def _without_made(
    document: Mapping[str, Any], others: Mapping[str, str | Path]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The document for inputs that it does not name, where its model can make them: without what says how.

    :returns: what was left out, too, in sentences.
    """
    found = dict(document)
    own, stated = document.get("experiment"), document.get(INPUTS, {})
    made = MADE.get(str(own.get("model")), {}) if isinstance(own, Mapping) else {}
    notes = []
    for name in [one for one in others if one in made and isinstance(stated, Mapping) and one not in stated]:
        found[INPUTS] = {**found.get(INPUTS, {}), name: {}}
        found, gone = _without(found, made[name])
        if isinstance(found.get("plots"), list):
            # What analysis says is of what is made.
            found["plots"] = [
                {key: value for key, value in plot.items() if key not in ("bounds", "marks")}
                if isinstance(plot, Mapping)
                else plot
                for plot in found["plots"]
            ]
        if gone:
            notes.append(f"the input {name} stands in place of what the file makes: without {', '.join(gone)}")
    return found, tuple(notes)


def _in_another_format(
    document: Mapping[str, Any], written: Mapping[str, Any], others: Mapping[str, str | Path], by_hand: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The document for inputs in another format than it states: that is of the trace that it was written for.

    :param written: the document as it was before settings, and maybe formats, were set by hand.
    :param by_hand: which settings were.
    :returns: which settings of that trace were left out, too, in sentences.
    """
    found, notes = dict(document), []
    for name in others:
        before, entry = (_entry(one, name) for one in (written, document))
        path, form = Path(others[name]), entry.get("format")
        if entry.get("path") or not isinstance(form, str) or not form or not path.is_file():
            continue
        if (other := another(path, form)) is not None:
            # The content tells.
            rest = {key: value for key, value in entry.items() if key not in ("format", "options")}
            found[INPUTS] = {**found[INPUTS], name: rest}
        kept = {*OF_FORMAT.get(other or form, ()), *by_hand}
        found, gone = _without(found, [key for key in OF_FORMAT.get(str(before.get("format")), ()) if key not in kept])
        if gone:
            said = f"the input {name} is in the format {other or form}, not {before['format']}"
            notes.append(f"{said}: without {', '.join(gone)}")
    return found, tuple(notes)


def _entry(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a document says of an input; empty where that is no table."""
    inputs = document.get(INPUTS)
    entry = inputs.get(name) if isinstance(inputs, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _without(document: Mapping[str, Any], keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The document without these settings and axes, and which of them it has."""
    found = dict(document)
    gone: list[str] = []
    for table in ("settings", "sweep"):
        given = found.get(table)
        if isinstance(given, Mapping):
            gone += [key for key in keys if key in given]
            found[table] = {key: value for key, value in given.items() if key not in keys}
    own = found.get("experiment")
    policies = own.get("policies") if isinstance(own, Mapping) else None
    if isinstance(own, Mapping) and isinstance(policies, list):
        policies, without = _policies_without(policies, keys)
        found["experiment"] = {**own, "policies": policies}
        gone += [key for key in keys if key in without and key not in gone]
    if gone and isinstance(found.get("plots"), list):
        found["plots"] = [_plot_without(plot, keys) for plot in found["plots"]]
        if not found.get("sweep") and not policies:
            del found["plots"]
    return found, gone


def _policies_without(policies: Sequence[Any], keys: Sequence[str]) -> tuple[list[Any], set[str]]:
    """Policies without these settings, those that are the same then once; and which settings there were."""
    found: list[Any] = []
    gone: set[str] = set()
    for policy in policies:
        rest = policy
        if isinstance(policy, Mapping):
            gone |= policy.keys() & set(keys)
            rest = {key: value for key, value in policy.items() if key not in keys}
            same = [{**one, "name": rest.get("name")} for one in found if isinstance(one, Mapping)]
            if len(rest) < len(policy) and rest in same:
                continue
        found.append(rest)
    return found, gone


def _plot_without(plot: Any, axes: Sequence[str]) -> Any:
    """A plot without these axes."""
    if not isinstance(plot, Mapping):
        return plot
    kept = dict(plot)
    places = [kept.get(key, []) for key in ("x", "lines", "panels")]
    if any(one in axes for place in places for one in ([place] if isinstance(place, str) else place)):
        # What is left finds places of its own.
        kept = {key: value for key, value in kept.items() if key not in ("x", "lines", "panels", "x_scale")}
    if isinstance(kept.get("where"), Mapping):
        kept["where"] = {axis: value for axis, value in kept["where"].items() if axis not in axes}
    return kept


def _settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings; what they mean is the model's."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        _allowed_name(name, where)
        found[name] = _plain(value, f"{where}.{name}")
    return found


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one, f"{where}.{name}") for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, where) for one in value]
    if not isinstance(value, bool | int | float | str):
        raise InvalidParameter(where, f"must be a number, a flag, a text, a list or a table, but is {value!r}")
    return value


def _allowed_name(name: str, where: str) -> None:
    if name in RESERVED or name.startswith(BOUND):
        hint = "; how many are run is experiment.seeds (--set seeds=N)" if name == "seed" else ""
        raise InvalidParameter(f"{where}.{name}", f"is a name of the results' own{hint}")


def _axes(given: Mapping[str, Any], where: str, before: str = "") -> Iterator[Axis]:
    for name, value in given.items():
        full, place = f"{before}{name}", f"{where}.{name}"
        _allowed_name(name, where)
        if full == POLICY:
            raise InvalidParameter(place, "stands in experiment.policies")
        if isinstance(value, Mapping) and "from" not in value:
            yield from _axes(value, place, f"{full}.")
            continue
        values = _range(value, place) if isinstance(value, Mapping) else value
        if not isinstance(values, list) or not values:
            raise InvalidParameter(place, f"must be a list or {{from, to, step}}, but is {value!r}")
        for one in values:
            if not isinstance(one, bool | int | float | str):
                raise InvalidParameter(place, f"must have numbers, flags or texts, but has {one!r}")
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise InvalidParameter(place, "has a number of more than 64 bits")
            if isinstance(one, float) and not math.isfinite(one):
                raise InvalidParameter(place, f"must have finite numbers, but has {one}")
        if len({(isinstance(one, bool), one) for one in values}) < len(values):
            raise InvalidParameter(place, "has a value twice")
        if len({_sort(one) for one in values}) > 1:
            raise InvalidParameter(place, "must have values of one sort: numbers, flags or texts")
        numbers = any(isinstance(one, float) for one in values)
        yield Axis(full, tuple(float(one) if numbers else one for one in values))


def _sort(value: Value) -> str:
    return "flag" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"


def _range(given: Mapping[str, Any], where: str) -> list[Value]:
    """From, by step, to and with the end; in decimal, so that .1 added up stays what it reads."""
    fields = Given(given, f"{where}.")
    numbers = {}
    for name in ("from", "to", "step"):
        fields.number(name, **({"above": 0} if name == "step" else {}))
        numbers[name] = given[name]
    fields.end()
    start, end, step = (Decimal(str(numbers[name])) for name in ("from", "to", "step"))
    if end < start:
        raise fields.wrong("to", f"must not be below from, but is {numbers['to']:g}")
    count = int((end - start) / step) + 1
    if count > _MOST_VALUES:
        raise fields.wrong("step", f"makes {count} values; at most {_MOST_VALUES} are allowed")
    whole = all(isinstance(value, int) for value in numbers.values())
    return [int(start + i * step) if whole else float(start + i * step) for i in range(count)]


def _policies(own: Given) -> Iterator[Policy]:
    given = own.value("policies", [])
    if not isinstance(given, list):
        raise own.wrong("policies", f"must be a list, but is {given!r}")
    seen = set()
    for entry in given:
        if isinstance(entry, str):
            policy = Policy(entry, {POLICY: entry})
        elif isinstance(entry, Mapping):
            fields = Given(entry, "experiment.policies.")
            name = fields.text("name")
            fields.text(POLICY, name)
            rest = {key: value for key, value in entry.items() if key not in ("name", POLICY)}
            settings = {POLICY: entry.get(POLICY, name)} | _settings(rest, "experiment.policies")
            policy = Policy(name, settings)
        else:
            raise own.wrong("policies", f"must have texts or tables, but has {entry!r}")
        if not policy.name or policy.name in seen:
            raise own.wrong("policies", f"must have names, each once, but has {policy.name!r}")
        seen.add(policy.name)
        yield policy


def _replaced(settings: dict[str, Any], name: str) -> None:
    """Remove a setting that an axis has in its place."""
    *tables, last = name.split(".")
    place: Any = settings
    for table in tables:
        place = place.get(table, {})
    place.pop(last, None)


def _apart(settings: Mapping[str, Any], axes: Sequence[Axis], policies: Sequence[Policy]) -> None:
    """What an axis varies no policy may state, and no other axis; it goes before a setting of its name."""
    if policies and POLICY in settings:
        raise InvalidParameter(f"settings.{POLICY}", "stands in experiment.policies, too; only one of them may")
    for number, axis in enumerate(axes):
        for other in axes[:number]:
            one, two = sorted((axis.name, other.name))
            if one == two or two.startswith(f"{one}."):
                raise InvalidParameter(f"sweep.{two}", f"says the same as sweep.{one}; only one of them may")
        *tables, last = axis.name.split(".")
        places: list[tuple[str, Mapping[str, Any]]] = [("settings", settings)]
        places += [(f"experiment.policies.{policy.name}", policy.settings) for policy in policies]
        for where, given in places:
            place: Any = given
            for table in tables:
                place = place.get(table, {}) if isinstance(place, Mapping) else {}
            if not isinstance(place, Mapping) or (last in place and given is not settings):
                raise InvalidParameter(f"sweep.{axis.name}", f"stands in {where}, too; only one of them may")


def _seeds(own: Given) -> tuple[int, ...]:
    given = own.value("seeds", 1)
    if isinstance(given, int) and given > _MOST_RUNS:
        raise own.wrong("seeds", f"are too many; at most {_MOST_RUNS} runs are allowed")
    seeds = list(range(1, given + 1)) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(seeds, list) or not seeds:
        raise own.wrong("seeds", f"must be how many (from 1 on) or a list, but is {given!r}")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise own.wrong("seeds", f"must be whole and not negative, but has {seed!r}")
    if len(set(seeds)) < len(seeds):
        raise own.wrong("seeds", "has a seed twice")
    return tuple(seeds)


def _inputs(
    given: Mapping[str, Any], directory: Path, others: Mapping[str, str | Path], model: str
) -> dict[str, Input]:
    # What a model makes itself may be given as well.
    known = dict.fromkeys((*given, *MADE.get(model, {})))
    for name in others:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            raise InvalidParameter(f"{INPUTS}.{name}", f"is no input of this experiment; {there}")
    found = {}
    for name, entry in given.items():
        place = f"{INPUTS}.{name}"
        fields = (
            Given({"path": entry} if isinstance(entry, str) else entry, f"{place}.")
            if isinstance(entry, str | Mapping)
            else None
        )
        if fields is None:
            raise InvalidParameter(place, f"must be a path or a table, but is {entry!r}")
        stated = fields.text("path", "")
        path = Path(others[name]).absolute() if name in others else (directory / stated).absolute()
        if not stated and name not in others:
            raise InvalidParameter(place, f"has no path here: state one by --input {name}=PATH")
        form = fields.text("format", "")
        order = fields.choice("order", ("buffer", "sort", ""), "")
        options = fields.table("options", {})
        for option, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise InvalidParameter(f"{place}.options.{option}", f"must be a number or a text, but is {value!r}")
        fields.end()
        if not path.is_file():
            raise InvalidParameter(place, f"is {path}, which is no file; --input {name}=PATH states another")
        found[name] = Input(path, form or None, dict(options), order or None)
    return found
