// What happened, newest first: the page is told of it by the stream, older pages are read when they are asked for.

import { ask } from "./api.js";
import { button, el, link, time } from "./dom.js";
import { filters, searched } from "./lists.js";
import { state } from "./state.js";

const MARKS = {
  deflated: "▼",
  reinflated: "▲",
  placed: "+",
  deleted: "−",
  preempted: "■",
  preempting: "■",
  returned: "↩",
  failed: "✕",
  refused: "✕",
  lost: "✕",
  pressure: "!",
  overcommitted: "!",
  contention: "!",
  migrated: "→",
  moving: "→",
  mode: "◆",
};

/** A sentence in which the VM and the host that it is about are links; if it does not name them, they follow it. */
export function told(event) {
  let parts = [
    event.sentence.startsWith(`${event.kind} `) ? event.sentence.slice(event.kind.length) : ` ${event.sentence}`,
  ];
  for (const [name, kind] of [
    [event.vm, "vm"],
    [event.host, "host"],
  ]) {
    if (!name) continue;
    const to = state[`${kind}s`].has(name) ? link(`#${kind}/${name}`, name) : name;
    const at = parts.findIndex((part) => typeof part === "string" && part.split(WORD).includes(name));
    if (at < 0) parts.push(" · ", to);
    else {
      const words = parts[at].split(WORD),
        first = words.indexOf(name);
      parts.splice(at, 1, words.slice(0, first).join(""), to, words.slice(first + 1).join(""));
    }
  }
  return parts;
}
const WORD = /([a-z0-9-]+)/;

export function eventList(events, none = "Nothing has happened yet.") {
  if (!events.length) return el("p", { class: "none" }, none);
  return el(
    "ol",
    { class: "events" },
    events.map((event) =>
      el(
        "li",
        { "data-key": event.id ?? `${event.at}${event.sentence}` },
        time(event.at),
        " ",
        el("strong", null, `${MARKS[event.kind] || "·"} ${event.kind}`),
        el("span", null, told(event)),
      ),
    ),
  );
}

export async function readOlder() {
  const mine = state.events;
  // `after` is a cursor of a page: the pages are walked from the newest one.
  let page = await ask("/v1/events?limit=1000"),
    found = [];
  for (let pages = 0; page && pages < 20; pages += 1) {
    // Of now: others may have come and gone meanwhile.
    const oldest = state.older.at(-1) || state.events.at(-1);
    found = page.events.filter((event) => !oldest || event.id < oldest.id);
    if (found.length || !page.next) break;
    page = await ask(`/v1/events?limit=1000&after=${encodeURIComponent(page.next)}`);
  }
  // What is known may be of another log by now.
  if (mine === state.events) state.older = [...state.older, ...found.slice(0, 500)];
}

export const events = {
  title: "Events",
  draw(_, query) {
    const all = [...state.events, ...state.older];
    const has = searched(query);
    const found = all.filter(
      (event) =>
        (!query.kind || event.kind === query.kind) &&
        has(`${event.kind} ${event.sentence} ${event.vm || ""} ${event.host || ""}`),
    );
    return [
      el("h1", null, "Events"),
      filters(query, [["kind", "kind", [...new Set(all.map((event) => event.kind))].sort()]]),
      eventList(found, "No such event among those that are loaded."),
      el("p", null, button("Read older ones", "older")),
    ];
  },
};
