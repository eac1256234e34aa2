// What was asked for: what is under way, what has ended, and one operation with its steps as they happen.

import { ask } from "./api.js";
import { button, el, lasting, link, number, plural, size, table, time } from "./dom.js";
import { filters, pageOf, pager, searched } from "./lists.js";
import { state } from "./state.js";

const MARKS = { running: "… running", done: "✓ done", partial: "◐ partial", failed: "✕ failed" };
export const stateWord = (operation) => MARKS[operation.state] || operation.state;
export const nowOf = (operation) =>
  operation.state === "running" && operation.progress.length
    ? operation.progress[operation.progress.length - 1]
    : operation.sentence;

export function operationTable(operations, caption, none) {
  return table(
    caption,
    ["began", "what", "VM", "host", "state", "so far"],
    operations.map((one) => [
      one.request_id,
      [
        link(`#operation/${encodeURIComponent(one.request_id)}`, [time(one.started_at)]),
        one.kind,
        one.vm ? link(`#vm/${one.vm}`, one.vm) : "–",
        one.host ? link(`#host/${one.host}`, one.host) : "–",
        stateWord(one),
        nowOf(one),
      ],
    ]),
    none,
  );
}

let listed = null,
  shown = null,
  missing = "";

export function forget() {
  listed = shown = null;
  missing = "";
}

export const operations = {
  title: "Operations",
  async load() {
    listed = await ask("/v1/operations?limit=200");
  },
  draw(_, query) {
    const has = searched(query),
      newest = listed ? listed.operations : [],
      known = new Set(newest.map((one) => one.request_id));
    // What runs is shown however much was asked for since.
    const all = listed ? [...newest, ...state.running.filter((one) => !known.has(one.request_id))] : [];
    const found = all.filter(
      (one) =>
        (!query.state || one.state === query.state) &&
        has(`${one.kind} ${one.vm || ""} ${one.host || ""} ${one.sentence} ${one.request_id}`),
    );
    const page = pageOf(found, all.length, query, 100),
      cut = listed && listed.next;
    return [
      el("h1", null, "Operations"),
      filters(query, [["state", "state", ["running", "done", "partial", "failed"]]]),
      cut &&
        el("p", { class: "key", "data-key": "note" }, `These are the newest ${newest.length}, and all that run.`),
      operationTable(
        page.rows,
        "Operations, newest first",
        cut ? "No such operation among them." : listed ? "No such operation." : "Loading …",
      ),
      pager(page, "operations"),
    ];
  },
};

export const steps = (operation) =>
  el(
    "ol",
    { class: "steps", "aria-live": "polite" },
    operation.progress.map((text, at) => el("li", { "data-key": at }, text)),
  );

/** The layers' ledger of one VM in an operation or resize. */
export function ledger(outcome) {
  return table(
    `Ledger of ${outcome.name}`,
    ["layer", "resource", "asked", "promised", "verified", "took", "reason"],
    outcome.ledger.map((row, at) => [
      String(at),
      [
        row.layer,
        row.resource,
        number(row.asked),
        number(row.promised),
        number(row.verified),
        lasting(row.seconds),
        row.reason || "–",
      ],
    ]),
    "No layer was asked.",
  );
}

/** All of an operation: what it says, its steps, and what each VM gave. */
export function whole(operation) {
  return [
    el(
      "p",
      { class: `outcome ${operation.state}` },
      el("strong", null, stateWord(operation)),
      " ",
      operation.sentence || nowOf(operation),
    ),
    operation.reason && el("p", null, `Reason: ${operation.reason.code}; missing ${size(operation.reason.missing)}.`),
    operation.progress.length > 0 && [el("h2", null, "Steps"), steps(operation)],
    operation.vms.map((outcome) =>
      el(
        "section",
        { "data-key": outcome.name },
        el("h2", null, link(`#vm/${outcome.name}`, outcome.name)),
        el("p", null, outcome.sentence),
        ledger(outcome),
      ),
    ),
  ];
}

export const operation = {
  title: "Operation",
  async load(id) {
    shown = await ask(`/v1/operations/${encodeURIComponent(id)}`, true);
    if (!shown) missing = id;
  },
  draw(id) {
    if (!shown || shown.request_id !== id)
      return [
        el("h1", null, `Operation ${id}`),
        el("p", { class: "none" }, missing === id ? "There is no such operation." : "Loading …"),
      ];
    return [
      el("h1", null, `${shown.kind} ${shown.vm || shown.host || ""}`),
      el(
        "p",
        null,
        "Began ",
        time(shown.started_at),
        shown.state === "running" ? "" : `, took ${lasting(shown.seconds)}`,
        `, ${plural(shown.vms.length, "VM")} touched.`,
      ),
      callOff(shown),
      whole(shown),
    ];
  },
};

/** A placement can be called off until its VM starts. */
export function callOff(one) {
  if (!one || one.state !== "running" || one.kind !== "create") return null;
  return el(
    "p",
    null,
    button("Call it off", "act", {
      "data-act": "calloff",
      "data-operation": one.request_id,
      "data-vm": one.vm,
      "data-role": "operator",
    }),
  );
}
