// What a user can have done: a form for each, tried first where the API can, its sentence, its steps, and calling it off.

import { ask, change, Problem, Refused, requestId, unanswered } from "./api.js";
import { button, el, morph, number, RESOURCES, size, table } from "./dom.js";
import { callOff, whole } from "./operations.js";
import { soon, state } from "./state.js";

const POLL_MS = 700;
const dialog = document.getElementById("dialog");

// A field: [where it stands in the body, label, kind, more]. Its error comes back by the same path.
const vector = (path, what, required = [], resources = RESOURCES.slice(0, 2)) =>
  resources.map(([name, word, unit]) => [
    `${path}.${name}`,
    `${what} ${word}, ${unit}`,
    "number",
    { step: "any", min: 0, required: required.includes(name) },
  ]);
const choice = (path, label, values) => [path, label, "select", { values }];
const yes = (path, label) => [path, label, "checkbox", {}];
const vmPath = (data, rest = "") => `/v1/vms/${encodeURIComponent(data.vm)}${rest}`;
/** A size to the hundredth; limits are rounded to the side that the API takes. */
const exact = (vector, round) => size(vector, (value) => String(round(Number((value * 100).toFixed(4))) / 100));
const sized = (data) => {
  const it = state.vms.get(data.vm);
  if (!it) return "";
  const most = exact(it.nominal, Math.floor),
    least = exact(it.minimum, Math.ceil);
  return `It has ${exact(it.current, Math.round)} of ${most}, and never less than ${least}.`;
};
const mode = (title, wanted, say) => ({
  title: (data) => `${title} ${data.host}`,
  say,
  method: "PUT",
  path: (data) => `/v1/hosts/${data.host}/mode`,
  fields: () => [["reason", "Reason", "text", { maxlength: 200 }]],
  fixed: { mode: wanted },
});

const ACTS = {
  create: {
    title: () => "Place a VM",
    say: "It is placed where it fits best; deflatable VMs give way where that is needed.",
    method: "POST",
    path: () => "/v1/vms",
    dry: true,
    fields: () => [
      ["vm.name", "Name", "text", { required: true, maxlength: 40 }],
      choice("vm.priority", "Sold as", ["deflatable", "fixed", "harvest"]),
      ...vector("vm.nominal", "Nominal", ["cpu_cores", "memory_mib"]),
      ...vector("vm.minimum", "Minimum"),
      ["vm.template", "Template (empty: lab)", "text", {}],
      choice("vm.on_preemption", "On preemption", ["stop", "suspend", "delete"]),
      ...vector("vm.ceiling", "Ceiling (harvest)"),
    ],
  },
  target: {
    title: (data) => `Deflate or grow ${data.vm}`,
    say: sized,
    method: "PUT",
    path: (data) => vmPath(data, "/target"),
    dry: true,
    fields: () => vector("target", "Size to reach:", [], RESOURCES),
  },
  resize: {
    title: (data) => `Sell ${data.vm} as another size`,
    say: sized,
    method: "PATCH",
    path: (data) => vmPath(data),
    fields: () => [
      ...vector("nominal", "Nominal"),
      ...vector("minimum", "Minimum"),
      choice("priority", "Sold as", ["", "deflatable", "fixed", "harvest"]),
    ],
  },
  start: {
    title: (data) => `Start ${data.vm}`,
    say: "Deflatable VMs give way where that is needed.",
    method: "POST",
    path: (data) => vmPath(data, "/start"),
    fields: () => [
      yes("anywhere", "on another host if its own has no room"),
      yes("lose_disk", "even if its disk stays behind"),
    ],
  },
  stop: {
    title: (data) => `Stop ${data.vm}`,
    say: "It powers off and is kept; others grow into its room.",
    method: "POST",
    path: (data) => vmPath(data, "/stop"),
    destroys: "what runs in it ends",
    fields: () => [["limit_s", "Seconds until it is switched off", "number", { min: 0, max: 3600, step: "any" }]],
  },
  migrate: {
    title: (data) => `Migrate ${data.vm}`,
    say: "It is stopped and started elsewhere, or moves while it runs.",
    method: "POST",
    path: (data) => vmPath(data, "/migrate"),
    fields: () => [
      ["host", "To host (empty: where it fits best)", "text", {}],
      yes("live", "while it runs"),
      yes("copy_storage", "with a copy of its disk"),
      yes("lose_disk", "even if its disk stays behind"),
    ],
  },
  delete: {
    title: (data) => `Delete ${data.vm}`,
    say: "It is stopped and removed with its disk, or its placement is called off.",
    method: "DELETE",
    path: (data) => vmPath(data),
    dry: true,
    destroys: "its disk is gone",
    fields: () => [],
    query: true,
  },
  pause: mode("Pause", "paused", "No VM is created there and no size is changed until it is resumed."),
  resume: mode("Resume", "active", "It takes VMs and changes sizes again."),
  drain: mode("Drain", "draining", "It takes no new VM."),
  off: mode("Undeflate", "off", "What was taken from its VMs is given back, then they are left alone."),
  forget: {
    title: (data) => `Forget ${data.host}`,
    say: "The manager drops it; it must not come back.",
    method: "DELETE",
    path: (data) => `/v1/hosts/${data.host}`,
    destroys: "its VMs may be gone with it",
    fields: () => [yes("lost_vms", "its VMs are gone with it")],
    query: true,
    at_once: true,
  },
  // Not by deleting the VM, which may run by the time that the manager is asked.
  calloff: {
    title: (data) => `Call the placement of ${data.vm} off`,
    say: "What was taken for it is given back. A VM that was started meanwhile stays.",
    method: "POST",
    path: (data) => `/v1/operations/${encodeURIComponent(data.operation)}/cancel`,
    fields: () => [],
  },
  cancel: {
    title: (data) => `Cancel the task ${data.task}`,
    say: "It leaves the queue, or ends where it runs.",
    method: "DELETE",
    path: (data) => `/v1/tasks/${encodeURIComponent(data.task)}`,
    fields: () => [],
    query: true,
    at_once: true,
  },
};

let open = null;

// Esc closes it, too. The event comes late: another one may be open by then.
dialog.addEventListener("close", () => {
  if (!dialog.open) release();
});

export function start(data) {
  // Copied: the page gives a button's data to another host or operation while the dialog is open.
  open = {
    act: ACTS[data.act],
    data: { ...data },
    // What is asked for is meant for the VM that is on show, not for one that was made anew by its name.
    version: data.version,
    errors: {},
    problem: "",
    report: null,
    done: false,
    operation: null,
    busy: false,
  };
  // Or the fields would keep what was typed for another one.
  dialog.replaceChildren();
  show();
  if (!dialog.open) dialog.showModal();
}

function field([path, label, kind, more]) {
  const id = `field-${path.replaceAll(".", "-")}`,
    error = open.errors[path],
    common = {
      id,
      name: path,
      "aria-invalid": error ? "true" : null,
      "aria-describedby": error ? `${id}-error` : null,
    };
  const input =
    kind === "select"
      ? el(
          "select",
          common,
          more.values.map((value) => el("option", { value }, value || "as it is")),
        )
      : el("input", { ...common, type: kind, autocomplete: "off", ...more });
  return el(
    "p",
    { class: `field ${kind}`, "data-key": path },
    el("label", { for: id }, label),
    input,
    error && el("span", { class: "error", id: `${id}-error` }, error),
  );
}

function show() {
  const { act, data, report, operation, problem, busy } = open,
    name = data.vm || data.host || "";
  const say = typeof act.say === "function" ? act.say(data) : act.say;
  const wrong = problem && el("p", { class: "error", role: "alert" }, problem);
  const form = el(
    "form",
    { id: "act", autocomplete: "off" },
    el("p", null, say),
    act.fields(data).map(field),
    act.destroys &&
      el(
        "p",
        { class: "field", "data-key": "confirm" },
        el("label", { for: "confirm" }, `To confirm that ${act.destroys}, type ${name}`),
        el("input", { id: "confirm", required: true, pattern: name, autocomplete: "off", title: name }),
      ),
    wrong,
    el(
      "p",
      { class: "actions" },
      act.dry &&
        el(
          "button",
          { type: "submit", value: "dry", formnovalidate: Boolean(act.destroys), disabled: busy },
          "Try it: nothing is changed",
        ),
      el(
        "button",
        { type: "submit", value: "do", disabled: busy, class: act.destroys ? "destroys" : "main" },
        act.title(data),
      ),
      button("Close", "close"),
    ),
    el("div", { role: "status", "data-key": "report" }, report && tried(report)),
  );
  const done =
    (operation || open.done) &&
    el(
      "div",
      { "data-key": "operation", role: "status" },
      operation ? [callOff(operation), whole(operation), wrong] : tried(report),
      el("p", { class: "actions" }, button(operation?.state === "running" ? "Close: it goes on" : "Close", "close")),
    );
  morph(dialog, el("div", null, el("h1", { id: "dialog-title" }, act.title(data)), done || form));
}

const change4 = (before, after) =>
  RESOURCES.filter(([name]) => Math.abs(before[name] - after[name]) > 0.005)
    .map(([name, , unit]) => `${number(before[name])} → ${number(after[name])} ${unit}`)
    .join(", ");
/** What a dry run or a deed at once says; of a forecast, what each VM would give. */
function tried(report) {
  if (report.vms?.some((vm) => vm.rows)) {
    return [
      el("p", { class: "outcome" }, report.sentence),
      report.vms.map((vm) =>
        el(
          "section",
          { "data-key": vm.name },
          el("p", null, vm.sentence),
          table(
            `What ${vm.name} would give`,
            ["layer", "resource", "asked", "could", "reason"],
            vm.rows.map((row, at) => [
              String(at),
              [row.layer, row.resource, number(row.asked), number(row.could), row.reason || "–"],
            ]),
            "No layer would be asked.",
          ),
        ),
      ),
    ];
  }
  return [
    el(
      "p",
      { class: `outcome ${report.would === "failed" ? "failed" : ""}` },
      report.would ? `${report.would === "done" ? "✓" : "✕"} ${report.sentence}` : report.sentence,
    ),
    report.deflated &&
      report.deflated.length > 0 &&
      table(
        "Who would shrink",
        ["VM", "would give"],
        report.deflated.map((row) => [row.name, [row.name, change4(row.before, row.after)]]),
        "",
      ),
    report.grown &&
      report.grown.length > 0 &&
      table(
        "Who would grow",
        ["VM", "would get"],
        report.grown.map((row) => [row.name, [row.name, change4(row.before, row.after)]]),
        "",
      ),
    report.preempted &&
      report.preempted.length > 0 &&
      el("p", { class: "error" }, `■ Would be preempted: ${report.preempted.join(", ")}`),
    report.steps &&
      report.steps.length > 0 &&
      el(
        "ol",
        { class: "steps" },
        report.steps.map((text) => el("li", null, text)),
      ),
  ];
}

function bodyOf(form, act) {
  const body = structuredClone(act.fixed || {});
  for (const [path, , kind] of act.fields(open.data)) {
    const input = form.elements[path],
      value = kind === "checkbox" ? input.checked || "" : input.value.trim();
    if (value === "") continue;
    const keys = path.split("."),
      last = keys.pop();
    let at = body;
    for (const key of keys) at = at[key] ??= {};
    at[last] = kind === "number" ? Number(value) : value;
  }
  return body;
}

const said = (error) => (unanswered(error) ? "The manager does not answer." : error.message);

function tell(error) {
  if (error.name === "AbortError") return;
  if (!open) return;
  if (error instanceof Refused) {
    dialog.close();
    return;
  }
  const known = new Set(open.act.fields(open.data).map(([path]) => path));
  open.errors = {};
  let rest = [];
  for (const one of (error instanceof Problem && error.errors) || []) {
    if (known.has(one.field)) open.errors[one.field] = one.detail;
    else rest.push(one.detail);
  }
  if (!rest.length && !Object.keys(open.errors).length) rest = [said(error)];
  open.problem = [error.title, ...rest].filter(Boolean).join(": ");
  open.busy = false;
  show();
  const wrong = dialog.querySelector("[aria-invalid]");
  if (wrong) wrong.focus();
}

export async function submit(form, how) {
  const mine = open,
    { act, data } = mine,
    dry = how === "dry";
  Object.assign(mine, { errors: {}, problem: "", report: null, busy: true });
  const body = bodyOf(form, act),
    request = (mine.request ??= requestId());
  show();
  try {
    // A try is a request of its own; the same deed, sent again, stays one deed.
    const fields = act.at_once
      ? body
      : { ...body, request_id: dry ? requestId() : request, ...(dry ? { dry_run: true } : {}) };
    const { version } = mine;
    const answer = act.query
      ? await change(act.method, `${act.path(data)}?${new URLSearchParams(fields)}`, { version })
      : await change(act.method, act.path(data), { body: fields, version });
    if (mine !== open) return;
    mine.busy = false;
    if (answer.status !== 202 || act.at_once) {
      // What is done is not offered again.
      Object.assign(mine, { report: answer.body, done: !dry });
      show();
      if (!dry) soon();
      return;
    }
    mine.operation = answer.body;
    show();
    await track(mine, answer.where);
  } catch (error) {
    // Without an answer it may have been done: it keeps its id, and is not done twice.
    if (error instanceof Problem && error.status < 500) mine.request = null;
    if (mine === open) tell(error);
  }
}

async function track(mine, where) {
  while (mine === open && dialog.open) {
    try {
      mine.operation = await ask(where);
      mine.problem = "";
    } catch (error) {
      if (!unanswered(error) && !(error.status >= 500)) throw error;
      mine.problem = said(error); // no answer now; it is asked again
    }
    if (mine !== open) return;
    show();
    soon();
    if (mine.operation.state !== "running") return;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** The dialog shows something else from now on; what is still under way is not shown in it. */
export function release() {
  open = null;
}

export function close() {
  release();
  dialog.close();
}
