// The page: which view is on show stands in the hash of the address; keys, theme, and the form that takes the token.

import { close, release, start, submit } from "./actions.js";
import { ask, enter, leave } from "./api.js";
import { forget as forgetHistory } from "./chart.js";
import { button, el, iso, link, morph } from "./dom.js";
import { forget as forgetVm, host, vm } from "./detail.js";
import { events, readOlder } from "./events.js";
import { forget as forgetOperations, operation, operations } from "./operations.js";
import { overview, preempted, vms } from "./overview.js";
import { settle } from "./lists.js";
import { alsoLoad, listening, looking, onChange, onRefused, reset, loadView, state } from "./state.js";
import { forget as forgetTasks, readOutput, task, tasks } from "./tasks.js";

const VIEWS = { overview, vms, tasks, preempted, operations, events, host, vm, task, operation };
const NAV = ["overview", "vms", "tasks", "preempted", "operations", "events"];
const RANK = { viewer: 1, operator: 2, admin: 3 },
  THEMES = ["", "dark", "light"];
const byId = (id) => document.getElementById(id),
  view = byId("view"),
  dialog = byId("dialog");
let session = null,
  pending = false,
  here = { name: "", arg: "", query: {} },
  theme = 0;

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that was cut off
  }
}

function read() {
  const [path, query] = location.hash.slice(1).split("?"),
    [name, ...arg] = path.split("/");
  const known = Object.hasOwn(VIEWS, name) ? name : "overview";
  const changed = known !== here.name || arg.join("/") !== here.arg;
  if (changed && VIEWS[here.name] && VIEWS[here.name].leave) VIEWS[here.name].leave();
  here = {
    name: known,
    arg: decoded(arg.join("/")),
    query: Object.fromEntries(new URLSearchParams(query || "")),
  };
  alsoLoad(async () => {
    if (VIEWS[known].load) await VIEWS[known].load(here.arg, here.query);
  });
  return changed;
}

/** Change what is asked for in the hash, without a step back for each letter. */
function put(more) {
  const query = new URLSearchParams(
    Object.entries({ ...here.query, page: "", ...more }).filter(([, value]) => value !== ""),
  );
  history.replaceState(
    null,
    "",
    `#${here.name}${here.arg ? `/${encodeURIComponent(here.arg)}` : ""}${query.size ? `?${query}` : ""}`,
  );
  read();
  draw();
  if (VIEWS[here.name].load && !("q" in more)) loadView();
}

function draw() {
  pending = false;
  if (!session) return;
  const made = el("div", null, VIEWS[here.name].draw(here.arg, here.query));
  for (const one of made.querySelectorAll("[data-role]"))
    if (!(RANK[state.role] >= RANK[one.dataset.role])) one.remove();
  const focused = document.activeElement;
  morph(view, made);
  settle(view);
  if (focused !== document.activeElement && view.contains(focused)) focused.focus({ preventScroll: true });
  morph(
    byId("nav"),
    el(
      "nav",
      null,
      NAV.map((name, at) =>
        link(`#${name}`, VIEWS[name].title, {
          "aria-current": name === here.name ? "page" : null,
          "aria-keyshortcuts": at + 1,
        }),
      ),
    ),
  );
  const loading = state.whole ? "" : "loading, ";
  byId("summary").textContent = state.at
    ? `${loading}as of ${iso(state.at)}${state.name ? `, for ${state.name} (${state.role})` : ""}`
    : "Loading …";
  const wrong = state.lost || state.missing;
  say(wrong);
  document.body.classList.toggle("lost", Boolean(wrong));
  document.title = `${here.arg || VIEWS[here.name].title} · Ebbtide`;
  if (VIEWS[here.name].after)
    VIEWS[here.name].after(view, `${theme}${matchMedia("(prefers-color-scheme: dark)").matches}`);
}

function say(text) {
  if (byId("problem").textContent !== text) byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

function later() {
  if (pending) return;
  pending = true;
  setTimeout(() => requestAnimationFrame(draw), 100);
}

function out(why) {
  if (session) leave();
  session = null;
  // All that was read with it: the next one may see less.
  for (const forget of [reset, forgetHistory, forgetVm, forgetOperations, forgetTasks]) forget();
  if (dialog.open) dialog.close();
  dialog.replaceChildren();
  view.replaceChildren();
  byId("summary").textContent = "";
  view.hidden = byId("nav").hidden = byId("leave").hidden = true;
  byId("enter").hidden = false;
  say(why || "");
  byId("token").focus();
}

byId("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  if (/[\s\p{C}]/u.test(token)) {
    out("The token has white space or an invisible character in it, as no token has: copy it again.");
    return;
  }
  reset();
  const mine = (session = enter(token));
  say("");
  byId("enter").hidden = true;
  view.hidden = byId("nav").hidden = byId("leave").hidden = false;
  read();
  draw();
  byId("main").focus();
  looking(mine);
  listening(mine);
  who(mine);
});

/** Buttons are there for what the token may do; the manager decides all the same. */
async function who(mine) {
  while (mine === session && !state.role) {
    await ask("/v1/whoami").then(
      (found) => Object.assign(state, { role: found.role, name: found.name }),
      () => {},
    );
    later();
    if (!state.role) await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

const DOES = {
  act: (data) => start(data),
  close,
  page: (data) => put({ page: data.page }),
  range: (data) => put({ range: data.range }),
  output: (data) => readOutput(data.task).then(draw, (error) => say(error.message)),
  older: () => readOlder().then(draw, (error) => say(error.message)),
};

document.addEventListener("click", (event) => {
  const at = event.target.closest("[data-do]");
  if (at) DOES[at.dataset.do](at.dataset);
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.query) put({ [event.target.dataset.query]: event.target.value });
});
document.addEventListener("submit", (event) => {
  if (event.target.id !== "act") return;
  event.preventDefault();
  submit(event.target, event.submitter ? event.submitter.value : "do");
});

const KEYS = [
  ["/", "search"],
  ["1 to 6", "views"],
  ["n", "place a VM"],
  ["t", "theme"],
  ["?", "these keys"],
  ["Esc", "close a dialog"],
];
function keys() {
  release();
  morph(
    dialog,
    el(
      "div",
      null,
      el("h1", { id: "dialog-title" }, "Keys"),
      el(
        "dl",
        null,
        KEYS.map(([key, what]) => el("div", null, el("dt", null, el("kbd", null, key)), el("dd", null, what))),
      ),
      button("Close", "close"),
    ),
  );
  if (!dialog.open) dialog.showModal();
}
document.addEventListener("keydown", (event) => {
  if (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    dialog.open ||
    /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)
  )
    return;
  const search = view.querySelector("[data-query=q]");
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  } else if (session && NAV[Number(event.key) - 1]) location.hash = NAV[Number(event.key) - 1];
  else if (event.key === "n" && RANK[state.role] >= RANK.operator) {
    event.preventDefault();
    start({ act: "create" });
  } else if (event.key === "t") next();
  else if (event.key === "?") keys();
});

function turn(to) {
  theme = Math.max(THEMES.indexOf(to), 0);
  document.documentElement.dataset.theme = THEMES[theme];
  byId("theme").textContent = `Theme: ${THEMES[theme] || "as the system"}`;
  later();
}

/** The next theme, kept over a reload where the browser keeps anything; the system's leaves nothing behind. */
function next() {
  turn(THEMES[(theme + 1) % THEMES.length]);
  stored((kept) => (theme ? kept.setItem("theme", THEMES[theme]) : kept.removeItem("theme")));
}

function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null; // the browser keeps nothing of this page
  }
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  const changed = read();
  if (!session) return;
  draw();
  loadView();
  if (changed) {
    byId("main").focus();
    scrollTo(0, 0);
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
byId("theme").addEventListener("click", next);
byId("keys").addEventListener("click", keys);
byId("leave").addEventListener("click", () => out());
onChange(later);
onRefused(out);
turn(stored((kept) => kept.getItem("theme")));
reset();
read();
