// One host and one VM: live figures, layers, why a size is what it is, history, and what can be done with it.

import { ask } from "./api.js";
import { historyOf, markList, mount, RANGES, readHistory, unmount } from "./chart.js";
import { button, definitions, el, link, number, RESOURCES, share, size, table, time } from "./dom.js";
import { eventList } from "./events.js";
import { paged, pager } from "./lists.js";
import { callOff, ledger, operationTable } from "./operations.js";
import { figures, hostState, KEY, modeLine, sizeCell, sumOf, vmState, vmTable } from "./overview.js";
import { isOff, lacks, state } from "./state.js";

const rangeOf = (query) => (Object.hasOwn(RANGES, query.range) ? query.range : "6h");
const act = (text, name, more) => button(text, "act", { "data-act": name, "data-role": "operator", ...more });
let explained = null,
  reported = null;

export function forget() {
  explained = reported = null;
}

function history(kind, name, query) {
  const range = rangeOf(query),
    found = historyOf(kind, name, range);
  return el(
    "section",
    { "data-key": "history" },
    el("h2", null, "History"),
    el(
      "div",
      { class: "filters", role: "group", "aria-label": "Range" },
      Object.keys(RANGES).map((one) =>
        el(
          "button",
          { type: "button", "data-do": "range", "data-range": one, "aria-pressed": String(one === range) },
          one,
        ),
      ),
    ),
    found === null && el("p", { class: "none" }, "The manager keeps no history of it."),
    found &&
      found.marks.length > 0 &&
      el(
        "p",
        { class: "key" },
        "Triangles mark events; they are listed below. Drag over a chart to look closer, double-click to go back.",
      ),
    el("div", { class: "charts", "data-own": true, "data-key": `${kind}/${name}/${range}` }),
    found && [
      el("h3", null, "What happened in this time"),
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "What happened in this time" },
        markList(found),
      ),
    ],
  );
}

const labels = (thing) =>
  Object.entries(thing.labels || {})
    .map(([label, value]) => ` · ${label}=${value}`)
    .join("");
const after = (root, theme) => mount(root.querySelector(".charts"), theme);

export const host = {
  title: "Host",
  async load(id, query) {
    // A report that repeats the one before is no change of the list.
    const [found] = await Promise.all([
      ask(`/v1/hosts/${encodeURIComponent(id)}`, true),
      readHistory("host", id, rangeOf(query)),
    ]);
    reported = found;
  },
  after,
  leave: unmount,
  draw(id, query) {
    const it = state.hosts.get(id);
    if (!it)
      return [
        el("h1", null, `Host ${id}`),
        el("p", { class: "none" }, state.whole ? "There is no such host." : "Loading …"),
      ];
    const mine = [...state.vms.values()].filter((vm) => vm.host === id),
      shown = paged(mine, query, 50),
      more = { "data-host": id };
    return [
      el("h1", null, `Host ${id}`),
      el("p", null, `${hostState(it)}${labels(it)}`),
      modeLine(it),
      el(
        "p",
        { class: "actions" },
        it.mode !== "paused" && act("Pause", "pause", more),
        it.mode !== "active" && act("Resume", "resume", more),
        it.mode !== "draining" && act("Drain", "drain", more),
        it.mode !== "off" && act("Undeflate and leave alone", "off", more),
        it.state === "silent" && act("Forget", "forget", more),
      ),
      el("div", { class: "host whole" }, figures(id, it.capacity, it.free, it.deflatable, sumOf(id).taken)),
      KEY(),
      definitions([
        ["agent", it.url],
        ["accelerator", it.accelerator],
        ["last report", time(reported && reported.id === id ? reported.seen_at : it.seen_at)],
        ["VMs", String(mine.length)],
      ]),
      el("section", null, el("h2", null, "VMs"), vmTable(shown.rows, "It has no VMs.", true), pager(shown, "VMs")),
      history("host", id, query),
      el(
        "section",
        null,
        el("h2", null, "Under way"),
        operationTable(
          state.running.filter((one) => one.host === id),
          "Operations of this host",
          "Nothing is under way.",
        ),
      ),
    ];
  },
};

function sizes(vm, bound) {
  return table(
    "Sizes",
    ["resource", "nominal", "current", "bound", "minimum", "ceiling", "lacks"],
    RESOURCES.filter(([name]) => vm.nominal[name] > 0).map(([name, word, unit]) => [
      name,
      [
        `${word}, ${unit}`,
        number(vm.nominal[name]),
        sizeCell(vm, name, unit, true),
        bound ? number(bound[name]) : "–",
        number(vm.minimum[name]),
        vm.ceiling ? number(vm.ceiling[name]) : "–",
        number(lacks(vm, name)),
      ],
    ]),
    "",
  );
}

function inside(found) {
  const inner = found.explanation,
    last = inner && inner.resizes[inner.resizes.length - 1],
    live = inner && inner.vm;
  return [
    found.plans.map((plan, at) => el("p", { class: "mode", "data-key": `plan-${at}` }, plan)),
    live &&
      definitions([
        ["pressure", live.pressure || "none is known"],
        ["contention", live.contention],
        ["CPU time throttled", live.throttled_share === null ? null : share(live.throttled_share)],
        ["asks for", size(live.asks)],
        ["drift repaired", String(live.drift_total)],
        ["guest", live.guest_connected ? "connected" : "silent"],
        ["guest kind", live.guest_kind],
        ["not yet deflatable", live.not_yet && `${number(live.not_yet.memory_mib)} MiB: ${live.not_yet.why}`],
        ["started", time(live.started_at)],
        ["domain", live.domain],
      ]),
    el(
      "section",
      null,
      el("h2", null, "Layers of its last resize"),
      last
        ? [el("p", null, time(last.at), " ", last.outcome.sentence), ledger(last.outcome)]
        : el("p", { class: "none" }, "Its host remembers no resize."),
    ),
    inner &&
      el(
        "section",
        null,
        el("h2", null, "Mechanisms"),
        table(
          "Mechanisms",
          ["mechanism", "layer", "state", "reason", "what would help"],
          inner.findings.map((row) => [
            `${row.layer}-${row.mechanism}`,
            [row.mechanism, row.layer, row.available ? "✓ usable" : "✕ not usable", row.reason || "–", row.fix || "–"],
          ]),
          "None is known.",
        ),
      ),
    inner &&
      el(
        "section",
        null,
        el("h2", null, "Latest decisions"),
        eventList(
          inner.decisions
            .slice(-12)
            .reverse()
            .map((row) => ({ ...row, id: row.number, vm: null })),
          "None is remembered.",
        ),
      ),
    el("section", null, el("h2", null, "Events"), eventList(found.events.slice(-12).reverse())),
  ];
}

export const vm = {
  title: "VM",
  async load(name, query) {
    const [found, fresh] = await Promise.all([
      ask(`/v1/vms/${encodeURIComponent(name)}/explain`, true),
      ask(`/v1/vms/${encodeURIComponent(name)}`, true),
      readHistory("vm", name, rangeOf(query)),
    ]);
    explained = { name, found, fresh };
  },
  after,
  leave: unmount,
  draw(name, query) {
    const known = explained && explained.name === name ? explained : null,
      it = (known && known.fresh) || state.vms.get(name);
    if (!it || (known && !known.fresh))
      return [
        el("h1", null, `VM ${name}`),
        el("p", { class: "none" }, known ? "There is no such VM." : "Loading …"),
        history("vm", name, query),
      ];
    const found = known && known.found,
      more = { "data-vm": name, "data-version": it.version },
      off = isOff(it);
    return [
      el("h1", null, `VM ${name}`),
      el(
        "p",
        null,
        `${vmState(it)} · ${it.priority}${labels(it)} · `,
        it.host ? ["on ", link(`#host/${it.host}`, it.host)] : "on no host",
      ),
      el(
        "p",
        { class: "outcome" },
        found && found.explanation
          ? found.explanation.sentence
          : (found && (found.unreachable || found.sentence)) || it.sentence,
      ),
      it.preempted && el("p", { class: "mode" }, `■ ${it.preempted.sentence}`),
      el(
        "p",
        { class: "actions" },
        !off && it.priority !== "fixed" && act("Deflate or grow", "target", more),
        act("Sell as another size", "resize", more),
        off ? act("Start", "start", more) : act("Stop", "stop", more),
        act("Migrate", "migrate", more),
        act("Delete", "delete", more),
      ),
      callOff(state.running.find((one) => one.vm === name && one.kind === "create")),
      sizes(it, found && found.explanation && found.explanation.bound),
      history("vm", name, query),
      found && inside(found),
    ];
  },
};
