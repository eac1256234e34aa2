// What runs where and why a task waits, the machines by how likely they keep their cores, and whether that comes true.

import { ask } from "./api.js";
import { bar, button, definitions, el, lasting, link, number, share, table, time } from "./dom.js";
import { filters, pageOf, pager, searched } from "./lists.js";

/** What a task prints, as it was last read. */
let printed = {};
let seen = null,
  one = null,
  missing = "";
const NEWEST = 200,
  MOST_ALIVE = 500,
  ALIVE = ["waiting", "released", "running"];
const DURATIONS = ["600", "3600", "14400", "86400"];
let duration = "3600";

export function forget() {
  printed = {};
  seen = one = null;
  missing = "";
}

/** The newest tasks and, however old they are, those that have not ended; and what of it is left out, in words. */
async function readTasks() {
  const newest = await ask(`/v1/tasks?limit=${NEWEST}`);
  if (!newest.next) return { tasks: newest.tasks, note: "" };
  const alive = await Promise.all(ALIVE.map((one) => ask(`/v1/tasks?limit=${MOST_ALIVE}&state=${one}`))),
    known = new Map();
  for (const row of [newest, ...alive].flatMap((page) => page.tasks)) if (!known.has(row.name)) known.set(row.name, row);
  const which = alive.some((page) => page.next) ? `the newest ${MOST_ALIVE} each` : "all";
  return {
    tasks: [...known.values()].sort((a, b) => b.submitted_at - a.submitted_at),
    note: `These are the newest ${NEWEST} tasks, and ${which} of those that wait, are released or run.`,
  };
}

export const tasks = {
  title: "Tasks",
  async load() {
    const asked = duration;
    const [list, machines, engine, acquirer, calibration] = await Promise.all([
      readTasks(),
      ask(`/v1/machines?limit=100&duration_s=${duration}`),
      ask("/v1/engine?machines=false"),
      ask("/v1/acquirer"),
      ask("/v1/calibration"),
    ]);
    if (duration !== asked) return; // another one was chosen, and is asked for
    seen = { ...list, asked, machines, engine, acquirer, calibration };
  },
  draw(_, query) {
    if (DURATIONS.includes(query.for)) duration = query.for;
    if (!seen) return [el("h1", null, "Tasks and machines"), el("p", { class: "none" }, "Loading …")];
    const has = searched(query);
    const found = seen.tasks.filter(
      (task) =>
        (!query.state || task.state === query.state) &&
        has(`${task.name} ${task.state} ${task.machine || ""} ${task.sentence}`),
    );
    const shown = pageOf(found, seen.tasks.length, query, 100);
    return [
      el("h1", null, "Tasks and machines"),
      el("p", null, `Engine: ${seen.engine.sentence}. Machines: ${seen.acquirer.sentence}.`),
      filters(query, [["state", "state", ["waiting", "released", "running", "done", "failed", "cancelled"]]]),
      seen.note && el("p", { class: "key", "data-key": "note" }, seen.note),
      table(
        "Tasks",
        ["task", "state", "machine", "cores", "submitted", "why"],
        shown.rows.map((task) => [
          task.name,
          [
            link(`#task/${task.name}`, task.name),
            task.state,
            task.machine || "–",
            String(task.cores),
            time(task.submitted_at),
            task.sentence,
          ],
        ]),
        seen.note ? "There are no such tasks among them." : "There are no such tasks.",
      ),
      pager(shown, "tasks"),
      el(
        "section",
        null,
        el("h2", null, "Machines"),
        el(
          "div",
          { class: "filters" },
          el(
            "label",
            null,
            "P_c for a task of ",
            el(
              "select",
              { "data-query": "for" },
              DURATIONS.map((s) => el("option", { value: s, selected: s === duration }, lasting(Number(s)))),
            ),
          ),
        ),
        el("p", { class: "key" }, `P_c: how likely a machine keeps its cores for ${lasting(Number(seen.asked))}.`),
        seen.machines.next && el("p", { class: "key" }, `These are the best ${seen.machines.machines.length}.`),
        table(
          "Machines",
          ["machine", "host", "cores", "unchanged for", "last change", "P_c", "runs"],
          seen.machines.machines.map((machine) => [
            machine.machine,
            [
              machine.machine,
              machine.host ? link(`#host/${machine.host}`, machine.host) : "–",
              String(machine.cores),
              lasting(machine.since_change_s),
              machine.last_change || "none yet",
              machine.completion_probability === null
                ? "no history yet"
                : [
                    share(machine.completion_probability),
                    bar(
                      [[machine.completion_probability, "used"]],
                      1,
                      `${machine.machine}: P_c ${share(machine.completion_probability)}`,
                    ),
                  ],
              runs(machine.machine),
            ],
          ]),
          "No machine is known.",
        ),
      ),
      el(
        "section",
        null,
        el("h2", null, "Calibration"),
        el(
          "div",
          { class: "pair" },
          calibration("machines keep their cores", seen.calibration.machines),
          calibration("tasks end undisturbed", seen.calibration.tasks),
        ),
      ),
    ];
  },
};

const runs = (name) =>
  seen.tasks
    .filter((task) => task.machine === name && task.state === "running")
    .map((task) => link(`#task/${task.name}`, `${task.name} `));

/** Predicted against observed: a well calibrated matcher lies on the diagonal. */
function calibration(what, curve) {
  const points = curve.deciles.filter((row) => row.count > 0);
  const said = curve.count
    ? `${curve.count} predictions that ${what}; Brier score ${number(curve.brier)}, worst error ${share(curve.worst_error)}.`
    : `No prediction that ${what} has come due yet.`;
  return el(
    "figure",
    null,
    el("figcaption", null, said),
    points.length > 0 && [
      el(
        "svg",
        { class: "calibration", viewBox: "-14 -4 122 118", role: "img", "aria-label": said },
        el("rect", { width: 100, height: 100, class: "ground" }),
        el("line", { x1: 0, y1: 100, x2: 100, y2: 0, class: "ideal" }),
        points.map((row) =>
          el("circle", {
            cx: row.predicted * 100,
            cy: 100 - row.observed * 100,
            r: 2 + Math.min(Math.log10(row.count + 1), 3),
          }),
        ),
        el("text", { x: 50, y: 111, "text-anchor": "middle" }, "predicted"),
        el("text", { x: -50, y: -5, transform: "rotate(-90)", "text-anchor": "middle" }, "observed"),
      ),
      table(
        `Deciles: ${what}`,
        ["predicted", "observed", "predictions"],
        points.map((row) => [String(row.low), [share(row.predicted), share(row.observed), String(row.count)]]),
        "",
      ),
    ],
  );
}

/** The last 16 KiB of what a task prints. */
export async function readOutput(name) {
  try {
    const part = await ask(`/v1/tasks/${encodeURIComponent(name)}/output?offset=-16384&limit=16384`);
    const more = part.running ? "it runs" : "it has ended";
    const said = `Attempt ${part.attempt}, bytes ${part.offset} to ${part.next_offset} of ${part.size}; ${more}.`;
    printed = { name, said, text: part.text };
  } catch (error) {
    if (!error.status) throw error;
    printed = { name, said: error.message, text: "" };
  }
}

function output(name) {
  const mine = printed.name === name;
  return el(
    "section",
    { "data-role": "operator" },
    el("h2", null, "Output"),
    el("p", null, button(mine ? "Read it again" : "Read its last 16 KiB", "output", { "data-task": name })),
    mine && el("p", { role: "status" }, printed.said),
    mine && printed.text && el("pre", { class: "output", tabindex: 0, "aria-label": `Output of ${name}` }, printed.text),
  );
}

export const task = {
  title: "Task",
  async load(name) {
    one = await ask(`/v1/tasks/${encodeURIComponent(name)}/explanation`, true);
    if (!one) missing = name;
  },
  draw(name) {
    if (!one || one.task.name !== name)
      return [
        el("h1", null, `Task ${name}`),
        el("p", { class: "none" }, missing === name ? "There is no such task." : "Loading …"),
      ];
    const it = one.task,
      ended = ["done", "failed", "cancelled"].includes(it.state);
    return [
      el("h1", null, `Task ${name}`),
      el("p", null, one.sentence),
      el(
        "p",
        null,
        !ended &&
          button("Cancel the task", "act", { "data-act": "cancel", "data-task": name, "data-role": "operator" }),
      ),
      definitions([
        ["state", it.state],
        ["machine", it.machine || "–"],
        ["cores", String(it.cores)],
        ["duration", lasting(it.duration_s)],
        ["submitted", time(it.submitted_at)],
        ["started", time(it.started_at)],
        ["ended", time(it.ended_at)],
        ["attempts", `${it.attempts} of ${it.max_attempts}`],
        ["preemptions", String(it.preemptions)],
        ["exit code", it.exit_code === null ? null : String(it.exit_code)],
        ["waits for", one.waits_for],
        ["tasks ahead", String(one.ahead)],
        ["command", el("code", null, it.command.join(" "))],
      ]),
      output(name),
      one.offers.length > 0 &&
        table(
          "Machines that it could run on",
          ["machine", "P_c", "expected", "wait", "compared"],
          one.offers.map((offer) => [
            offer.machine,
            [
              offer.machine,
              offer.completion_probability === null ? "no history yet" : share(offer.completion_probability),
              lasting(offer.expected_s),
              lasting(offer.wait_s),
              lasting(offer.compared_s),
            ],
          ]),
          "",
        ),
    ];
  },
};
