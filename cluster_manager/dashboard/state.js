// What the page knows of the cluster: all hosts and VMs are read once, from then on what has changed, every few seconds
// and as soon as an event arrives.

import { ask, follow, inside, Refused, unanswered } from "./api.js";

const PAGE = 1000,
  LOOK_MS = 5000,
  NEWS_MS = 400,
  AGAIN_MS = 2000,
  MOST_EVENTS = 300,
  REST = 4,
  MOST_REST_MS = 20_000;

export const state = {
  hosts: new Map(),
  vms: new Map(),
  running: [],
  events: [],
  older: [],
  role: "",
  name: "",
  at: 0,
  whole: false,
  lost: "", // what is wrong with what is read of the cluster
  missing: "", // and with what the view on show reads of its own
  version: 0,
};

let lists,
  last,
  again = false,
  changed = () => {},
  refused = () => {},
  extra = null,
  reading = null,
  wake = null;

export function onChange(callback) {
  changed = callback;
}
export function onRefused(callback) {
  refused = callback;
}
/** What the view on show reads at each look. */
export function alsoLoad(load) {
  extra = load;
  state.missing = "";
}

export function reset() {
  for (const map of [state.hosts, state.vms]) map.clear();
  Object.assign(state, { running: [], events: [], older: [], role: "", name: "", at: 0, whole: false });
  Object.assign(state, { lost: "", missing: "" });
  lists = {
    hosts: { path: "/v1/hosts", key: "id", since: 0, whole: false },
    vms: { path: "/v1/vms", key: "name", since: 0, whole: false },
  };
  last = 0;
}

function put(kind, item) {
  item.words =
    kind === "vms"
      ? `${item.name} ${item.host || ""} ${item.state} ${item.priority}`
      : `${item.id} ${item.state} ${item.mode}`;
  for (const [label, value] of Object.entries(item.labels || {})) item.words += ` ${label}=${value}`.toLowerCase();
  state[kind].set(item[lists[kind].key], item);
  state.version += 1;
}

function drop(kind, key) {
  if (state[kind].delete(key)) state.version += 1;
}

/** Read what has changed since the last time, or all where that is not known: of a large cluster in several pages. */
async function news(kind) {
  const list = lists[kind],
    mine = lists,
    seen = new Set(),
    gone = new Set();
  let after = "",
    first = null,
    whole = true;
  do {
    const page = await ask(`${list.path}?limit=${PAGE}&changed_since=${list.since}${after}`);
    if (mine !== lists) return;
    first ||= page;
    whole &&= page.changed_since === null;
    for (const key of page.gone || []) gone.add(key);
    for (const item of page[kind]) {
      put(kind, item);
      seen.add(item[list.key]);
    }
    after = page.next && `&after=${encodeURIComponent(page.next)}`;
    if (!list.whole) shown();
  } while (after);
  if (whole) for (const key of [...state[kind].keys()]) if (!seen.has(key)) drop(kind, key);
  for (const key of gone) if (!seen.has(key)) drop(kind, key);
  list.since = first.changes || 0;
  list.whole = true;
}

function shown() {
  state.whole = lists.hosts.whole && lists.vms.whole;
  state.at = Date.now() / 1000;
  state.lost = "";
  changed();
}

async function underWay() {
  const found = [];
  let after = "";
  do {
    const page = await ask(`/v1/operations?state=running&limit=${PAGE}${after}`);
    found.push(...page.operations);
    after = page.next && `&after=${encodeURIComponent(page.next)}`;
  } while (after);
  return found;
}

async function look() {
  loadView();
  const parts = [underWay(), news("hosts"), news("vms")];
  await Promise.allSettled(parts); // where one fails, the next look begins only once the others have ended
  const [running] = await Promise.all(parts);
  state.running = running;
  shown();
}

/** Look again now, once what is happening has settled. */
export function soon() {
  if (wake) wake(NEWS_MS);
  else again = true;
}

/** Read what the view on show has of its own. No list waits for it: it may ask a host that hangs. */
export function loadView() {
  const load = extra,
    mine = lists,
    current = () => load === extra && mine === lists;
  if (!load || reading === load) return;
  reading = load;
  load()
    .then(
      () => current() && (state.missing = ""),
      (error) => current() && (state.missing = problem(error, LOOK_MS)),
    )
    .finally(() => {
      if (reading === load) reading = null;
      changed();
    });
}

export async function looking(mine) {
  while (inside(mine)) {
    again = false;
    const began = Date.now(),
      first = !state.whole;
    await look().catch(failed);
    // Where very much changes, the manager has most of its time for others.
    const rest = first || state.lost ? 0 : Math.min((Date.now() - began) * REST, MOST_REST_MS);
    const pause = Math.max(state.lost ? AGAIN_MS : again ? NEWS_MS : LOOK_MS, rest);
    await new Promise((resolve) => {
      let timer = setTimeout(resolve, pause);
      wake = (ms) => {
        if (Math.max(ms, rest) < pause) {
          clearTimeout(timer);
          timer = setTimeout(resolve, Math.max(ms, rest));
          wake = null;
        }
      };
    });
    wake = null;
  }
}

function failed(error) {
  if (error.name === "AbortError") return;
  state.lost = problem(error, AGAIN_MS);
  changed();
}

function problem(error, again_ms) {
  if (error instanceof Refused) {
    refused(error.message);
    return "";
  }
  const offline = unanswered(error) ? "The manager does not answer." : `${sentence(error.message)}`;
  const age = state.at ? " What is shown may be out of date." : "";
  return `${offline}${age} It is asked again every ${again_ms / 1000} s.`;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function take(event) {
  if (event.id <= last) return;
  last = event.id;
  state.events.unshift(event);
  const late = state.events.splice(MOST_EVENTS);
  // Where older ones were read these join them, or a stretch would be missing in between; as many stay as were read.
  if (state.older.length) state.older = [...late, ...state.older].slice(0, state.older.length);
  soon();
  changed();
}

export async function listening(mine) {
  let known = false;
  while (inside(mine)) {
    try {
      if (!known) {
        const page = await ask("/v1/events?limit=100");
        Object.assign(state, { events: page.events, older: [] });
        last = Math.max(page.position, page.events.length ? page.events[0].id : 0);
        known = true;
        changed();
      }
      await follow(last, take, () => {
        if (state.lost) soon();
      });
      if (inside(mine)) soon();
    } catch (error) {
      // A store that was put back to an earlier state counts from there.
      if (error.code === "ahead-of-log") known = false;
      failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Whether it holds nothing; one that failed may be there still. `ebb top` has the same rule (columns.py). */
export const isOff = (vm) =>
  ["placing", "stopped", "preempted"].includes(vm.state) || (vm.state === "failed" && !vm.current.memory_mib);
export const lacks = (vm, name) => (isOff(vm) ? 0 : Math.max(vm.nominal[name] - vm.current[name], 0));
export const isDeflated = (vm) => lacks(vm, "cpu_cores") > 0.005 || lacks(vm, "memory_mib") > 0.5;

let sums = { version: -1, hosts: new Map() };
/** By host: its VMs, and what was taken from them; counted again only after a change. */
export function perHost() {
  if (sums.version === state.version) return sums.hosts;
  const hosts = new Map();
  for (const vm of state.vms.values()) {
    if (!vm.host) continue;
    let sum = hosts.get(vm.host);
    if (!sum)
      hosts.set(
        vm.host,
        (sum = { count: 0, deflated: 0, taken: { cpu_cores: 0, memory_mib: 0, disk_mib_s: 0, network_mib_s: 0 } }),
      );
    sum.count += 1;
    if (isDeflated(vm)) sum.deflated += 1;
    for (const name in sum.taken) sum.taken[name] += lacks(vm, name);
  }
  sums = { version: state.version, hosts };
  return hosts;
}
