// The whole cluster, its hosts with their bars, and the list of VMs.

import { bar, button, el, iso, link, number, plural, RESOURCES, size, table, time } from "./dom.js";
import { isDeflated, isOff, lacks, perHost, state } from "./state.js";
import { filters, paged, pager } from "./lists.js";
import { eventList } from "./events.js";
import { operationTable } from "./operations.js";

const MODES = {
  paused: "is paused: no VM is created and no size is changed until it is resumed",
  draining: "is draining: it takes no new VM",
  off: "is off: what was taken is given back, then its VMs are left alone",
};
const STATE_MARKS = {
  ready: "●",
  overcommitted: "▲",
  unavailable: "▲",
  silent: "○",
  active: "",
  paused: "‖",
  draining: "▽",
  off: "□",
};

export const KEY = () =>
  el(
    "p",
    { class: "key" },
    el("span", null, el("i", { class: "swatch used" }), "not free: held by VMs or by what else the host runs"),
    el("span", null, el("i", { class: "swatch deflated" }), "taken from VMs: what they lack of their nominal sizes"),
    el("span", null, el("i", { class: "swatch free" }), "free"),
  );

/** What is not free of a capacity, whoever holds it, and what was taken from VMs, as words and as bars. */
export function figures(of, capacity, free, deflatable, taken) {
  return RESOURCES.filter(([name]) => capacity[name] > 0).map(([name, word, unit]) => {
    const used = Math.max(capacity[name] - free[name], 0);
    const said = `${number(used)} of ${number(capacity[name])} ${unit} not free`;
    const more = `${number(taken[name])} taken, ${number(deflatable[name])} deflatable`;
    return el(
      "div",
      { class: "figure", "data-key": name },
      el("p", null, el("b", null, word), ` ${said}`, el("small", null, more)),
      bar([[used, "used"]], capacity[name], `${of}, ${word}: ${said}`),
      taken[name] > 0 &&
        bar(
          [[taken[name], "deflated"]],
          capacity[name],
          `${of}, ${word}: ${number(taken[name])} ${unit} taken from VMs`,
        ),
    );
  });
}

const NONE = { count: 0, deflated: 0, taken: { cpu_cores: 0, memory_mib: 0, disk_mib_s: 0, network_mib_s: 0 } };
export const sumOf = (host) => perHost().get(host) || NONE;

export function hostState(host) {
  const mark = STATE_MARKS[host.state] || "";
  if (host.state === "silent") return `${mark} silent since ${iso(host.seen_at)}`;
  return `${mark} ${host.state}${host.state_reason ? `: ${host.state_reason}` : ""}`;
}

export function modeLine(host) {
  if (host.mode === "active") return null;
  const reason = host.mode_reason ? ` (${host.mode_reason})` : "";
  return el(
    "p",
    { class: "mode", "data-key": `mode-${host.id}` },
    `${STATE_MARKS[host.mode]} ${host.id} ${MODES[host.mode] || `is ${host.mode}`}${reason}`,
  );
}

function card(host) {
  const sum = sumOf(host.id);
  return el(
    "article",
    { class: `host ${host.state}`, "data-key": host.id },
    el(
      "h2",
      null,
      link(`#host/${host.id}`, host.id),
      el("small", null, `${hostState(host)} · ${plural(sum.count, "VM")}, ${sum.deflated} deflated`),
    ),
    figures(host.id, host.capacity, host.free, host.deflatable, sum.taken),
  );
}

function totals(hosts) {
  const sum = { capacity: {}, free: {}, deflatable: {}, taken: {} };
  for (const [name] of RESOURCES) {
    for (const part of ["capacity", "free", "deflatable"])
      sum[part][name] = hosts.reduce((all, host) => all + host[part][name], 0);
    sum.taken[name] = hosts.reduce((all, host) => all + sumOf(host.id).taken[name], 0);
  }
  return sum;
}

const tile = (value, word, to) => el("a", { class: "tile", href: to }, el("b", null, String(value)), ` ${word}`);

export const overview = {
  title: "Overview",
  draw(_, query) {
    const hosts = [...state.hosts.values()],
      vms = [...state.vms.values()],
      ready = hosts.filter((host) => host.state === "ready");
    const shown = paged(hosts, { ...query, sort: "id" }, 24),
      sum = totals(ready);
    return [
      el("h1", null, "Overview"),
      el(
        "div",
        { class: "tiles" },
        tile(`${ready.length} of ${hosts.length}`, "hosts ready", "#overview"),
        tile(vms.filter((vm) => !isOff(vm)).length, "VMs run", "#vms"),
        tile(vms.filter(isDeflated).length, "deflated", "#vms?only=deflated"),
        tile(vms.filter((vm) => vm.state === "preempted").length, "preempted", "#preempted"),
        tile(state.running.length, "operations under way", "#operations"),
      ),
      hosts.map(modeLine),
      hosts.length > 1 &&
        el(
          "section",
          { class: "host whole" },
          el("h2", null, "All ready hosts"),
          figures("All ready hosts", sum.capacity, sum.free, sum.deflatable, sum.taken),
        ),
      KEY(),
      hosts.length > 12 &&
        filters(query, [
          ["state", "state", ["ready", "overcommitted", "unavailable", "silent"]],
          ["mode", "mode", ["active", "paused", "draining", "off"]],
        ]),
      el("div", { class: "hosts" }, shown.rows.map(card)),
      !hosts.length && el("p", { class: "none" }, state.whole ? "No host has reported yet." : "Loading …"),
      pager(shown, "hosts"),
      el(
        "section",
        null,
        el("h2", null, "Under way"),
        operationTable(state.running.slice(0, 10), "Operations under way", "Nothing is under way."),
        state.running.length > 10 &&
          el(
            "p",
            null,
            "These are the newest 10. ",
            link("#operations?state=running", `All ${state.running.length} operations under way`),
          ),
      ),
      el(
        "section",
        null,
        el("h2", null, "Latest events"),
        eventList(state.events.slice(0, 8)),
        link("#events", "All events"),
      ),
    ];
  },
};

/** What a VM holds and lacks, as a bar with the minimum as a mark. */
function sizeBar(vm, name, unit) {
  const parts = [
    [vm.current[name], "used"],
    [lacks(vm, name), "deflated"],
  ];
  const said = `${vm.name}: ${number(vm.current[name])} of ${number(vm.nominal[name])} ${unit}`;
  const minimum = vm.minimum[name];
  return bar(parts, (vm.ceiling || vm.nominal)[name], `${said}, minimum ${number(minimum)}`, [minimum]);
}

/** A size, beside the nominal one or alone, over its bar. */
export function sizeCell(vm, name, unit, alone = false) {
  if (!((vm.ceiling || vm.nominal)[name] > 0)) return "–";
  if (isOff(vm)) return vm.state === "placing" ? "not yet" : "off";
  const current = number(vm.current[name]);
  return [alone ? current : `${current} of ${number(vm.nominal[name])} ${unit}`, sizeBar(vm, name, unit)];
}

export const vmState = (vm) =>
  `${isDeflated(vm) ? "▼ deflated" : vm.state}${vm.saved_mib === null ? "" : " (suspended)"}`;

/** Rows of VMs; of a host's own page without the host. */
export function vmTable(vms, none, hostless = false) {
  const heads = ["VM", ...(hostless ? [] : ["host"]), "state", "sold as", "CPU", "memory", "last"];
  return table(
    "VMs",
    heads,
    vms.map((vm) => [
      vm.name,
      [
        link(`#vm/${vm.name}`, vm.name),
        ...(hostless ? [] : [vm.host ? link(`#host/${vm.host}`, vm.host) : "–"]),
        vmState(vm),
        vm.guest_connected || isOff(vm) ? vm.priority : `${vm.priority}, guest silent`,
        sizeCell(vm, "cpu_cores", "cores"),
        sizeCell(vm, "memory_mib", "MiB"),
        vm.preempted ? vm.preempted.sentence : vm.sentence,
      ],
    ]),
    none,
  );
}

export const vms = {
  title: "VMs",
  draw(_, query) {
    const shown = paged([...state.vms.values()], query, 50);
    return [
      el("h1", null, "VMs"),
      filters(
        query,
        [
          [
            "state",
            "state",
            [
              "running",
              "placing",
              "starting",
              "stopping",
              "stopped",
              "paused",
              "migrating",
              "preempted",
              "deleting",
              "failed",
            ],
          ],
          ["priority", "sold as", ["fixed", "deflatable", "harvest"]],
          ["only", "only", ["deflated"]],
          ["sort", "sorted by", ["name", "host", "state", "CPU lacking", "memory lacking"]],
        ],
        button("Place a VM", "act", { "data-act": "create", "data-role": "operator" }),
      ),
      el("p", { class: "key" }, "The mark in a bar is the minimum."),
      vmTable(shown.rows, state.whole ? "There are no such VMs." : "Loading …"),
      pager(shown, "VMs"),
    ];
  },
};

export const preempted = {
  title: "Preempted",
  draw(_, query) {
    const all = [...state.vms.values()]
      .filter((vm) => vm.preempted)
      .sort((a, b) => a.preempted.position - b.preempted.position);
    const shown = paged(all, { q: query.q, page: query.page, sort: null }, 50);
    return [
      el("h1", null, "Queue of preempted VMs"),
      el("p", null, "In the order in which they come back when there is room."),
      filters(query, []),
      table(
        "Preempted VMs",
        ["place", "VM", "since", "waits for", "why"],
        shown.rows.map((vm) => [
          vm.name,
          [
            String(vm.preempted.position),
            link(`#vm/${vm.name}`, vm.name),
            time(vm.preempted.at),
            size(vm.preempted.waits_for),
            vm.preempted.sentence,
          ],
        ]),
        "No VM is preempted.",
      ),
      pager(shown, "preempted VMs"),
    ];
  },
};
