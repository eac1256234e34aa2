// What the page knows of the cluster, kept up to date from one stream: what an event names is read at once, and each look
// reads one page of hosts and one of VMs, going round. Of a small cluster that is all of it.

import { ask, follow, inside, Refused } from "./api.js";

const PAGE = 500,
  FIRST = 1000,
  LOOK_MS = 5000,
  NEWS_MS = 300,
  AGAIN_MS = 2000,
  MOST_EVENTS = 300,
  MOST_AT_ONCE = 8;

export const state = {
  hosts: new Map(),
  vms: new Map(),
  running: [],
  events: [],
  role: "",
  name: "",
  at: 0,
  whole: false,
  lost: "",
  version: 0,
};

let lists,
  wanted,
  last,
  changed = () => {},
  refused = () => {},
  extra = null,
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
}

export function reset() {
  for (const map of [state.hosts, state.vms]) map.clear();
  Object.assign(state, { running: [], events: [], role: "", name: "", at: 0, whole: false, lost: "" });
  lists = {
    hosts: { path: "/v1/hosts", key: "id", next: null, round: 1, whole: false, at: 0 },
    vms: { path: "/v1/vms", key: "name", next: null, round: 1, whole: false, at: 0 },
  };
  wanted = { hosts: new Set(), vms: new Set() };
  last = 0;
}

function put(kind, item) {
  item.round = lists[kind].round;
  if (kind === "vms") item.words = `${item.name} ${item.host || ""} ${item.state} ${item.priority}`;
  else item.words = `${item.id} ${item.state} ${item.mode}`;
  state[kind].set(item[lists[kind].key], item);
  state.version += 1;
}

async function nextPage(kind) {
  const list = lists[kind];
  const page = await ask(`${list.path}?limit=${list.whole ? PAGE : FIRST}${list.next ? `&after=${encodeURIComponent(list.next)}` : ""}`);
  for (const item of page[kind]) put(kind, item);
  list.next = page.next;
  if (page.next) return;
  // What did not come in a whole round is gone.
  for (const [key, item] of state[kind])
    if (item.round !== list.round) {
      state[kind].delete(key);
      state.version += 1;
    }
  list.round += 1;
  list.whole = true;
}

async function named(kind) {
  const list = lists[kind],
    keys = [...wanted[kind]].slice(0, MOST_AT_ONCE);
  await Promise.all(
    keys.map(async (key) => {
      wanted[kind].delete(key);
      const found = await ask(`${list.path}/${encodeURIComponent(key)}`, true);
      if (found) put(kind, found);
      else if (state[kind].delete(key)) state.version += 1;
    }),
  );
}

/** What an event names, and a page when it is time for one; of a small cluster the page is all of it. */
async function news(kind) {
  const list = lists[kind],
    small = list.whole && state[kind].size <= PAGE,
    due = !list.whole || Date.now() - list.at >= LOOK_MS;
  if (wanted[kind].size && !small) await named(kind);
  if (!due && !(small && wanted[kind].size)) return;
  wanted[kind] = small ? new Set() : wanted[kind];
  list.at = Date.now();
  await nextPage(kind);
}

let besides = 0;
async function look() {
  // While a large cluster is being read, the rest is looked at now and then.
  const all = state.whole || Date.now() - besides > 1000;
  if (all) besides = Date.now();
  const [, , running] = await Promise.all([
    news("hosts"),
    news("vms"),
    all ? ask("/v1/operations?state=running&limit=100") : null,
    all && extra ? extra() : null,
  ]);
  if (running) state.running = running.operations;
  state.whole = lists.hosts.whole && lists.vms.whole;
  state.at = Date.now() / 1000;
  state.lost = "";
  changed();
}

/** Look again now, once what is happening has settled. */
export function soon() {
  if (wake) wake(NEWS_MS);
}

export async function looking(mine) {
  while (inside(mine)) {
    await look().catch(failed);
    // The rest of a large cluster comes at once; what events name, soon.
    const pause = state.lost ? AGAIN_MS : !state.whole ? 0 : wanted.vms.size + wanted.hosts.size ? NEWS_MS : LOOK_MS;
    await new Promise((resolve) => {
      let timer = setTimeout(resolve, pause);
      wake = (ms) => {
        if (ms < pause) {
          clearTimeout(timer);
          timer = setTimeout(resolve, ms);
          wake = null;
        }
      };
    });
    wake = null;
  }
}

function failed(error) {
  if (error.name === "AbortError") return;
  if (error instanceof Refused) {
    refused(error.message);
    return;
  }
  const offline = error instanceof TypeError ? "The manager does not answer." : `${sentence(error.message)}`;
  const age = state.at ? " What is shown may be out of date." : "";
  state.lost = `${offline}${age} It is asked again every ${AGAIN_MS / 1000} s.`;
  changed();
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function take(event) {
  if (event.id <= last) return;
  last = event.id;
  state.events.unshift(event);
  state.events.length = Math.min(state.events.length, MOST_EVENTS);
  if (event.vm) wanted.vms.add(event.vm);
  if (event.host) wanted.hosts.add(event.host);
  soon();
  changed();
}

export async function listening(mine) {
  let known = false;
  while (inside(mine)) {
    try {
      if (!known) {
        const page = await ask("/v1/events?limit=100");
        state.events = page.events;
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

export const isOff = (vm) => ["placing", "stopped", "preempted", "failed"].includes(vm.state);
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
